"""The compiled products: each output one chain in the order of the inputs, whatever is computed beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, get_args

import numba
import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

from tokenteller.model import kernels, packing
from tokenteller.model.config import Storage
from tokenteller.model.kernels import GROUP, NIBBLES, PANEL
from tokenteller.model.kernels.launch import KERNELS
from tokenteller.model.linear import Linear
from tokenteller.model.packing import pack, unpack

STORAGES = get_args(Storage)


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("outputs", "inputs"), [(PANEL, GROUP), (3 * PANEL + 5, 2 * GROUP + 7), (1, 1)])
def test_a_row_has_the_same_bits_in_every_crowd(storage: Storage, outputs: int, inputs: int) -> None:
    product = Linear(numbers(outputs, inputs), storage, numbers(outputs, seed=2))
    x = numbers(41, inputs, seed=3)
    together = product(x)
    for count in (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 40):
        for first in (0, 41 - count):
            assert torch.equal(product(x[first : first + count].contiguous()), together[first : first + count])


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_an_output_is_one_chain_of_fused_multiply_adds(storage: Storage) -> None:
    """In float64, whose products of two fp32 are exact, each step rounded to fp32: a fused multiply-add."""
    weight, x = numbers(5, 70), numbers(3, 70, seed=3)
    stored = weight.to(packing.DTYPES[storage]).double().numpy()
    expected = np.zeros((3, 5), np.float32)
    for n in range(70):
        expected = (expected.astype(np.float64) + x[:, n : n + 1].double().numpy() * stored[:, n]).astype(np.float32)
    # adding in float64 rounds once more, which can show in a last bit
    np.testing.assert_allclose(Linear(weight, storage)(x).numpy(), expected, rtol=3e-7, atol=1e-7)


def in_integers(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What int8 means: groups rounded to -127..127 with a scale each, their sums exact, a chain over the groups."""
    groups = -(-x.shape[1] // GROUP)

    def rounded(rows: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        filled = np.zeros((len(rows), groups * GROUP), np.float32)
        filled[:, : rows.shape[1]] = rows
        filled = filled.reshape(len(rows), groups, GROUP)
        most = np.abs(filled).max(axis=2)
        inverse = np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), np.float32(0))
        return np.rint(filled * inverse[:, :, None]).astype(np.int64), most / np.float32(127)

    (a, a_scale), (b, b_scale) = rounded(x), rounded(weight)
    total = np.zeros((len(x), len(weight)), np.float32)
    for g in range(groups):
        sums = (a[:, g] @ b[:, g].T).astype(np.float64)
        both = (a_scale[:, g, None] * b_scale[None, :, g]).astype(np.float64)
        total = (total + sums * both).astype(np.float32)
    return total


@pytest.mark.parametrize("depth", [4, 2, 1])
def test_int8_is_exact_integers_at_every_depth(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without byte dots compute the same: four bytes, two or one at a time."""
    if depth > kernels.DEPTH:
        pytest.skip(f"this processor multiplies {kernels.DEPTH} bytes at a time")
    x, weight = numbers(9, 2 * GROUP + 3), numbers(PANEL + 3, 2 * GROUP + 3, seed=2)
    monkeypatch.setattr(packing, "DEPTH", depth)
    panels = pack([weight], "int8")
    groups = panels.scales.shape[1]
    values = np.empty((9, groups * GROUP), {4: np.int8, 2: np.int16, 1: np.int32}[depth])
    scales, starts = np.empty((9, groups), np.float32), np.empty((9, groups), np.int32)
    kernels.quantise(x.numpy(), values, scales, starts, GROUP, -128 if depth == 4 else 0)
    out = np.empty((9, PANEL + 3), np.float32)
    kernels.multiply_quantised(values, scales, starts, panels.numbers, panels.scales, panels.bias, out, False)
    np.testing.assert_allclose(out, in_integers(x.numpy(), weight.numpy()), rtol=3e-7, atol=1e-6)
    assert abs(out - (x @ weight.T).numpy()).max() < 0.03 * abs(out).max()


def test_int4_is_exact_integers_a_step_and_a_lowest() -> None:
    """Sums of 0..15 x -127..127 in groups are exact; what a weight begins at counts with the sum of the values."""
    inputs = 3 * NIBBLES
    x, weight = numbers(9, inputs).numpy(), numbers(PANEL + 3, inputs, seed=2)
    groups = weight.numpy().reshape(PANEL + 3, 3, NIBBLES)
    lowest = groups.min(axis=2).astype(np.float16).astype(np.float32)
    step = ((groups.max(axis=2) - lowest) / 15).astype(np.float16).astype(np.float32)
    b = np.rint((groups - lowest[:, :, None]) / step[:, :, None]).clip(0, 15)
    rows = x.reshape(9, 3, NIBBLES)
    scale = np.abs(rows).max(axis=2) / np.float32(127)
    a = np.rint(rows * (np.float32(127) / np.abs(rows).max(axis=2))[:, :, None])
    expected = np.zeros((9, PANEL + 3), np.float32)
    for g in range(3):
        begun = expected + np.outer(a[:, g].sum(axis=1, dtype=np.float32) * scale[:, g], lowest[:, g]).astype(
            np.float64
        )
        both = np.outer(scale[:, g], step[:, g]).astype(np.float64)
        expected = (begun.astype(np.float32) + (a[:, g] @ b[:, g].T) * both).astype(np.float32)
    got = Linear(weight, "int4")(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-6)
    assert abs(got - x @ weight.numpy().T).max() < 0.1 * abs(got).max()


def test_int4_loses_nothing_of_weights_in_sixteen_steps() -> None:
    generator = np.random.default_rng(3)
    lowest, step = (generator.normal(size=(40, 4, 1)).astype(np.float16).astype(np.float32) for _ in range(2))
    steps = generator.integers(0, 16, size=(40, 4, NIBBLES))
    steps[:, :, 0], steps[:, :, 1] = 0, 15
    weight = (lowest + np.abs(step) * steps).astype(np.float32).reshape(40, 4 * NIBBLES)
    got = unpack(pack([torch.from_numpy(weight)], "int4"), np.arange(40), 4 * NIBBLES)
    np.testing.assert_allclose(got, weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_a_packed_weight_come_back(storage: Storage) -> None:
    weight = numbers(PANEL + 9, GROUP + 9)
    ids = np.array([0, PANEL + 8, 7, 7])
    got = unpack(pack([weight], storage), ids, GROUP + 9)
    close = {"fp32": 0, "fp16": 1e-3, "bf16": 1e-2, "int8": 0.02, "int4": 0.2}[storage]
    np.testing.assert_allclose(got, weight[ids].numpy(), rtol=close, atol=close)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_and_in_its_row(storage: Storage, poison: float) -> None:
    product, x = Linear(numbers(40, 70), storage), numbers(20, 70, seed=3)
    clean = product(x)
    x[4, 69] = poison
    got = product(x)
    assert not got[4].isfinite().any()
    others = torch.arange(20) != 4
    assert torch.equal(got[others], clean[others])


def test_a_group_of_zeros_is_zero() -> None:
    for storage in ("int8", "int4"):
        assert not Linear(torch.zeros(3, 70), storage)(numbers(2, 70)).any()
        assert not Linear(numbers(3, 70), storage)(torch.zeros(2, 70)).any()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_equal_torch(kind: Any, gated: bool) -> None:
    from tokenteller.model.layers import ACTIVATIONS

    x = torch.cat((numbers(19, 60) * 4, torch.tensor([[-200.0, 200.0, 0.0] * 20])))
    out = np.empty((20, 30 if gated else 60), np.float32)
    kernels.activate(x.numpy(), kernels.ACTIVATIONS[kind], gated, out)
    gate, up = x.chunk(2, dim=-1)
    expected = ACTIVATIONS[kind](gate) * up if gated else ACTIVATIONS[kind](x)
    torch.testing.assert_close(torch.from_numpy(out), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_norms_equal_torch(bias: bool) -> None:
    x, weight, added = numbers(19, 60), numbers(60, seed=2), numbers(60, seed=3)
    out = np.empty((19, 60), np.float32)
    kernels.norm(x.numpy(), weight.numpy(), added.numpy() if bias else np.empty(0, np.float32), np.float32(1e-5), out)
    norm = torch.nn.functional.layer_norm(x, (60,), weight, added) if bias else None
    expected = torch.nn.functional.rms_norm(x, (60,), weight, 1e-5) if norm is None else norm
    torch.testing.assert_close(torch.from_numpy(out), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [24, 64, 80, 96, 128, 200])
def test_norm_adds_in_one_order_whatever_the_layout(width: int) -> None:
    """Heads side by side in memory, and the same rows in an array of their own, which compiles to other code."""
    heads = np.random.default_rng(width).standard_normal((9, 3, width)).astype(np.float32)
    weight, none = np.ones(width, np.float32), np.empty(0, np.float32)
    together, alone = np.empty_like(heads), np.empty((9, width), np.float32)
    for head in range(3):
        kernels.norm(heads[:, head], weight, none, np.float32(1e-5), together[:, head])
        kernels.norm(heads[:, head].copy(), weight, none, np.float32(1e-5), alone)
        assert together[:, head].tobytes() == alone.tobytes()


def test_numbas_threads_are_started_before_code_is_read_back_from_disk() -> None:
    """A block whose parts came from disk when it was compiled does not start them itself, and crashes without."""
    code = "import tokenteller.model.kernels, numba; print(numba.threading_layer())"  # ValueError if none was started
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_compiled_function_states_whether_its_sums_may_be_reordered() -> None:
    """One that does not would take it from whoever is compiled first, and its bits with it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("tokenteller.model.kernels.")]
    functions = {name: value for each in modules for name, value in vars(each).items() if isinstance(value, Dispatcher)}
    functions |= {name: kernel.body for name, kernel in KERNELS.items()}
    assert len(functions) > 20
    assert [name for name, function in functions.items() if "fastmath" not in function.targetoptions] == []
    exact = {"multiply_floats", "multiply_integers", "quantise_rows", "_quantise_row", "_multiply_floats", "attend"}
    assert {name for name in exact if functions[name].targetoptions["fastmath"]} == set()


def printed(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_how_threads_wait_is_said_before_openmp_is_loaded_and_can_be_said_otherwise() -> None:
    code = "import sys, os, tokenteller.model; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    assert printed(code).strip() == "active"
    assert printed(code, OMP_WAIT_POLICY="passive").strip() == "passive"


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one processor: no thread helps another")
def test_the_threads_that_helped_to_load_are_ended() -> None:
    """Beside those of the engine they are more than there are processors, and libgomp lets none of them spin."""
    code = """
import os, time, torch
from tokenteller.model.linear import Linear
from tokenteller.server.engine.runner import end_idle_threads, use_threads

def threads():
    return len(os.listdir("/proc/self/task"))

use_threads(1)
Linear(torch.ones(512, 512))(torch.ones(4, 512))
alone = threads()
use_threads(2)
Linear(torch.ones(512, 512))(torch.ones(4, 512))
helped = threads()
end_idle_threads()
end = time.monotonic() + 5
while threads() > alone and time.monotonic() < end:
    time.sleep(0.01)
print(helped - alone, threads() - alone)
"""
    assert printed(code).split() == ["1", "0"]
