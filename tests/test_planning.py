"""The plan: from a config or a GGUF header alone, also for models far larger than this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoints import Kind, config_of, llama_config, random_hf, random_llama, to_gguf
from live import serve

from tokenteller.model.checkpoint import load
from tokenteller.model.config import Storage
from tokenteller.model.formats.stored import read_config
from tokenteller.model.kernels import GROUP, PANEL, Panels
from tokenteller.model.kv_memory import KVPlan
from tokenteller.server.__main__ import main
from tokenteller.server.planning import Plan, check_memory, make_plan, plan_text
from tokenteller.server.settings import PlanSettings

MIB, GIB = 2**20, 2**30
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
}


def made(model: Path | str, **settings: Any) -> Plan:
    return make_plan(PlanSettings(model=str(model), **settings))


def planned(directory: Path, **settings: Any) -> KVPlan:
    return made(directory, **settings).kv


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """Seventy billion parameters, and no file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def test_a_70b_model_is_planned_from_its_config_alone(huge: Path) -> None:
    assert read_config(str(huge)).num_parameters == 70_553_706_496  # what its model card says
    plan = planned(huge, memory=160 * GIB, weights="fp16")
    assert plan.bytes_per_token == 2 * 80 * 8 * 128 * 4
    assert plan.weight_bytes == pytest.approx(2 * 70_553_706_496, rel=1e-3)
    assert plan.pool_bytes == 160 * GIB - plan.weight_bytes
    fit = {row.tokens: row.fit for row in plan.table}
    assert fit[4096] == plan.pool_bytes // (4096 * plan.bytes_per_token) == 11
    assert fit[131_072] == 0 and not plan.fits
    text = plan_text(made(huge, memory=160 * GIB, weights="fp16"))
    assert "one sequence of 131,072 tokens needs 80 GiB of K/V, the pool has 28.58 GiB" in text
    longest = int(text.split("--max-context ")[1].split(")")[0])
    assert planned(huge, memory=160 * GIB, weights="fp16", max_context=longest).fits
    assert not planned(huge, memory=160 * GIB, weights="fp16", max_context=longest + 8).fits  # a page has 8 rows


def test_weights_that_do_not_fit_are_the_first_advice(huge: Path) -> None:
    plan = planned(huge, memory=200 * GIB, weights="fp32")
    assert not plan.fits and plan.pool_bytes == 0
    assert plan.advice[0] == "the weights alone need 262.8 GiB, the memory is 200 GiB"
    assert plan.advice[1] == "with --weights fp16 they need 131.4 GiB"


@pytest.mark.parametrize("memory", ["1", "1MiB", "4MiB", "6MiB"])
@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_the_advice_for_too_little_memory_can_be_followed(
    capsys: pytest.CaptureFixture[str], memory: str, weights: str
) -> None:
    flags = ["plan", "--weights", weights]
    assert main([*flags, "--memory", memory, "--slots", "1"]) == 0
    told = capsys.readouterr().out
    if "does not fit" in told:
        assert "--kv-memory" not in told and "at most 0 billion" not in told
        more = told.split("(--memory ")[1].split(")")[0]
        assert main([*flags, "--memory", more]) == 0 and "does not fit" not in capsys.readouterr().out


def test_the_command_prints_the_same_plan_as_text_and_as_json(huge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model", str(huge), "--memory", "160GiB", "--weights", "fp16"]
    assert main(flags) == 0
    assert "K/V pool    28.58 GiB: no sequence of 131,072 tokens at once" in capsys.readouterr().out
    assert main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(planned(huge, memory=160 * GIB, weights="fp16").to_json())
    )


def test_a_missing_model_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tokenteller: model 'nowhere' is not a directory") and len(error.splitlines()) == 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_a_gguf_header_gives_the_plan_of_its_twin(tmp_path: Path, family: str) -> None:
    directory = random_hf(tmp_path / "hf", config_of(family))
    twin = to_gguf(directory, tmp_path / "twin.gguf")
    assert planned(twin, memory=GIB) == planned(directory, memory=GIB)


@pytest.mark.parametrize(
    ("kind", "weights", "kv_dtype"),
    [("F32", "fp32", "fp32"), ("F16", "fp16", "fp16"), ("Q8_0", "int8", "fp16"), ("Q4_0", "int4", "fp16")],
)
def test_by_default_weights_are_as_stored_and_kv_is_fp16_for_numbers_of_16_bits(
    tmp_path: Path, kind: str, weights: Storage, kv_dtype: Storage
) -> None:
    file = to_gguf(random_hf(tmp_path / "hf", config_of("llama")), tmp_path / "file.gguf", Kind[kind])
    plan = made(file)
    assert (plan.weights, plan.kv_dtype) == (weights, kv_dtype)
    assert plan.kv.weight_bytes == planned(file, weights=weights).weight_bytes
    assert plan.kv.bytes_per_element == (4 if kv_dtype == "fp32" else 2)
    text = plan_text(plan)
    assert f", {weights} (" in text and kind in text.splitlines()[0] and f"per token, {kv_dtype}" in text
    on_gpu = made(file, device="cuda", kv_memory=GIB)
    assert on_gpu.weights == on_gpu.kv_dtype == ("fp16" if weights.startswith("int") else weights)


def test_what_is_asked_for_is_taken_whatever_the_file_has(tmp_path: Path) -> None:
    directory = random_hf(tmp_path, config_of("llama"))
    plan = made(directory, weights="int8", kv_dtype="fp16")
    assert (plan.weights, plan.weights_why, plan.kv_dtype) == ("int8", "--weights", "fp16")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert (made(directory).weights, made(directory).kv_dtype) == ("bf16", "fp16")
    assert (made(directory, device="cuda").weights, made(directory, device="cuda").kv_dtype) == ("bf16", "bf16")


def test_the_toy_keeps_k_and_v_in_fp32() -> None:
    assert (made("toy").weights, made("toy").kv_dtype) == ("fp16", "fp32")


@pytest.mark.parametrize(
    ("free", "pool", "fits", "why"),
    [
        (9_999, 128 * MIB, "64 sequences of 1,024 tokens at once", "every slot at full length"),
        (200, 100 * MIB, "50 sequences of 1,024 tokens at once, or 64 of 512", "half of the 200 MiB that the weights"),
        (10, 5 * MIB, "2 sequences of 1,024 tokens at once", "half of the 10 MiB that the weights leave free"),
        (1, MIB // 2, "no sequence of 1,024 tokens at once", "half of the 1 MiB that the weights leave free"),
        (-5, 0, "no sequence of 1,024 tokens at once", "half of the 0 B that the weights leave free"),
    ],
)
def test_the_default_pool_is_half_of_what_is_free_at_most_and_says_what_that_means(
    monkeypatch: pytest.MonkeyPatch, free: int, pool: int, fits: str, why: str
) -> None:
    """The toy takes 2 MiB for a full sequence."""
    weights = made("toy").kv.weight_bytes
    monkeypatch.setattr("tokenteller.server.planning.available_memory", lambda: weights + free * MIB)
    plan = made("toy")
    assert plan.kv.pool_bytes == pool
    assert f": {fits} ({why}" in plan_text(plan)
    assert planned(Path("toy"), kv_memory=3 * MIB).pool_bytes == 3 * MIB


def test_a_budget_beyond_the_memory_there_is_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = made("toy", kv_memory=8 * MIB)
    check_memory(plan)
    monkeypatch.setattr("tokenteller.server.planning.available_memory", lambda: 10 * MIB)
    said = "needs 13.79 MiB .weights 5.79 MiB, K/V pool 8 MiB., but 10 MiB are available; lower --kv-memory"
    with pytest.raises(MemoryError, match=said):
        check_memory(plan)
    with pytest.raises(ValueError, match="one sequence of 1,024 tokens needs 2 MiB of K/V"):
        check_memory(made("toy", kv_memory=4096))


def test_head_dim_is_the_configs_own_and_not_width_over_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(head_dim=24)))
    assert planned(tmp_path).bytes_per_token == 2 * 2 * 2 * 24 * 4


def test_windows_are_shown_and_bound_what_a_sequence_takes(tmp_path: Path) -> None:
    config = config_of("mistral", max_position_embeddings=32_768, sliding_window=1024, head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = planned(tmp_path, memory=GIB)
    assert "; 2 layers keep no more than 1,024 tokens" in plan_text(made(tmp_path, memory=GIB))
    assert plan.sequence_bytes == plan.table[-1].bytes_each == plan.table[-4].bytes_each
    assert plan.sequence_bytes < 2048 * plan.bytes_per_token
    longer_chunks = planned(tmp_path, memory=GIB, prefill_chunk=512)
    assert longer_chunks.sequence_bytes > plan.sequence_bytes


def test_a_pool_that_is_not_paged_has_as_many_slots_as_bytes_allow(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    plan = planned(tmp_path, device="cuda", weights="bf16", kv_memory=10 * 256 * 256 + 5)
    assert plan.bytes_per_token == 256 and plan.sequence_bytes == 256 * 256
    assert not plan.paged and plan.slots == 10


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_take_exactly_the_planned_bytes(tmp_path: Path, family: str, tied: bool, storage: Storage) -> None:
    """Beside them, products are filled up to whole panels of outputs, and in int8 to whole groups of inputs."""
    directory = random_hf(
        tmp_path, config_of(family, tie_word_embeddings=tied, **{"attention_bias": True} if family == "llama" else {})
    )
    decoder = load(str(directory), storage).decoder
    held: dict[int, int] = {}

    def count(value: Any) -> None:
        """Every tensor and array that an object holds, once by its memory."""
        if isinstance(value, torch.Tensor):
            held[value.data_ptr()] = value.nbytes
        elif isinstance(value, Panels):
            held.update({part.ctypes.data: part.nbytes for part in value if part.size})
        elif isinstance(value, list):
            for item in value:
                count(item)
        elif type(value).__module__.startswith("tokenteller.model."):
            for item in vars(value).values() if hasattr(value, "__dict__") else ():
                count(item)

    count(decoder)
    tables = sum(part.nbytes for part in (decoder.rope.cos, decoder.rope._frequencies))
    filled = 0
    for linear in decoder.linears():
        outputs, inputs = linear.shape
        groups = -(-inputs // GROUP)
        form = "int8" if storage == "int4" and linear is decoder.head else storage
        nibbles = 20 * -(-inputs // 32)
        wide = {"fp32": 4 * inputs, "bf16": 2 * inputs, "int8": groups * (GROUP + 4), "int4": nibbles}[form]
        filled += -(-outputs // PANEL) * PANEL * wide
        filled -= outputs * (inputs + 4 * groups if form == "int8" else wide)
    assert sum(held.values()) - tables == decoder.config.weight_bytes(storage) + filled


def test_a_server_shows_the_plan_that_the_command_makes(tmp_path: Path) -> None:
    directory = random_llama(tmp_path)
    with serve(model=str(directory), slots=3, kv_memory=2**20) as server:
        shown = httpx.get(server.url + "/plan", timeout=10).json()
        assert server.service.engine.runner.pool.slots == 3
    assert shown == json.loads(json.dumps(planned(directory, slots=3, kv_memory=2**20).to_json()))
