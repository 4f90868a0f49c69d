"""The decoder on a GPU: the same code with another attention call. What needs no GPU is tested on CPU tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, random_hf, random_llama
from live import serve
from test_attention import attended
from test_parity import CASES, TOKENS, Twin, close, forward, twin_of

from tokenteller.model.attention import attend_batch
from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("window", [1000, 8, 1])
def test_one_call_for_the_batch_equals_the_kernel_row_by_row(heads: int, kv_heads: int, window: int) -> None:
    """Sequences of 1, 7 and 30 new rows that begin at different positions, in slots out of order."""
    generator = torch.Generator().manual_seed(heads)
    kv = torch.randn(5, 2, 2, kv_heads, 60, 16, generator=generator)
    spans = [(3, 41, 42), (0, 0, 7), (4, 20, 50)]
    slots = torch.tensor([slot for slot, start, stop in spans for _ in range(start, stop)])
    positions = torch.tensor([position for _, start, stop in spans for position in range(start, stop)])
    q = torch.randn(len(slots), heads, 16, generator=generator)
    scale = 1 / math.sqrt(16)
    expected = torch.from_numpy(attended(q.numpy(), kv.numpy(), slots.numpy(), positions.numpy(), 1, window))
    actual = attend_batch(q, kv, slots, positions, 1, scale, window)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_poisoned_sequence_leaves_the_others_of_the_call_alone() -> None:
    kv = torch.ones(2, 1, 2, 1, 8, 4)
    kv[1] = torch.nan
    slots, positions = torch.tensor([0, 0, 1]), torch.tensor([3, 4, 2])
    mixed = attend_batch(torch.ones(3, 1, 4), kv, slots, positions, 0, 0.5, 8)
    assert mixed[:2].eq(1).all() and mixed[2].isnan().all()


def without_kernel(twin: Twin, **layout: Any) -> KVPool:
    """A pool as a GPU has it: an ordinary tensor, which no compiled kernel can read."""
    pool = KVPool(KVLayout.of(twin.decoder.config, 256, paged=False, **layout), slots=4)
    pool.flat = None
    return pool


@pytest.mark.parametrize("case", ["llama 6/2", "mistral", "qwen2 some windows", "qwen3 6/2 head_dim 24", "gpt2"])
def test_the_whole_decoder_without_the_kernel_equals_the_reference(tmp_path: Path, case: str) -> None:
    twin = twin_of(random_hf(tmp_path, CASES[case]))
    pool, a, b = without_kernel(twin), TOKENS[:40], TOKENS[60:110]
    forward(twin.decoder, pool, (2, b[:-1], 0))
    mixed = forward(twin.decoder, pool, (0, a[:9], 0), (2, b[-1:], len(b) - 1))
    close(mixed, torch.cat((twin.expected(a[:9]), twin.expected(b)[-1:])))
    close(forward(twin.decoder, pool, (0, a[9:], 9)), twin.expected(a)[9:])


def test_int8_is_a_form_of_the_cpu(rand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(CheckpointError, match="--weights int8: only on the CPU, not on cuda; use --weights fp16"):
        load(str(rand), "int8", device="cuda")


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_every_storage_multiplies_what_it_stores_and_adds_the_bias(storage: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((24, 40), (24,), (5, 40)))
    rounding = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[storage]
    expected = (x.double() @ weight.to(rounding).double().T + bias.double()).float()
    coarse = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 0.15}[storage]
    torch.testing.assert_close(Linear(weight, storage, bias)(x), expected, atol=coarse, rtol=0)
    torch.testing.assert_close(Linear(weight, storage)(x), expected - bias, atol=coarse, rtol=0)


def test_a_device_that_is_not_there_is_one_line(rand: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(CheckpointError, match="--device cuda: "):
        load(str(rand), "fp16", device="cuda")


@gpu
@needs_cuda
@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_a_gpu_computes_what_the_cpu_computes(tmp_path: Path, storage: Any) -> None:
    directory = random_hf(tmp_path, config_of("qwen3"))
    on_cpu, on_gpu = load(str(directory), "fp32").decoder, load(str(directory), storage, device="cuda").decoder
    layout = KVLayout.of(on_gpu.config, 256, bytes_per_element=on_gpu.kv_dtype.itemsize, paged=False)
    pool = KVPool(layout, slots=4, device="cuda", dtype=on_gpu.kv_dtype)
    expected = forward(on_cpu, KVPool(KVLayout.of(on_cpu.config, 256), slots=1), (0, TOKENS[:40], 0))
    actual = torch.cat([forward(on_gpu, pool, (3, TOKENS[at : at + 8], at)) for at in range(0, 40, 8)])
    coarse = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.8}[storage]
    torch.testing.assert_close(actual, expected, atol=coarse, rtol=coarse)


@gpu
@needs_cuda
def test_a_gpu_serves(tmp_path: Path) -> None:
    directory = random_llama(tmp_path)
    with serve(model=str(directory), slots=4, weights="fp32") as server:
        expected = server.text("hello", max_tokens=32, temperature=0)
    with serve(model=str(directory), slots=4, weights="fp32", device="cuda", kv_memory=2**24) as server:
        assert server.text("hello", max_tokens=32, temperature=0) == expected
        assert server.wait_idle()["pool"]["committed_bytes"] == 0
