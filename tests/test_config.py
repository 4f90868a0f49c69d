"""ModelConfig: a key that changes the maths is honoured or refused by name; older and newer spellings mean the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, damaged, random_hf
from safetensors.torch import load_file

from tokenteller.model.config import ModelConfig, Rope
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.hf_config import read_hf_config
from tokenteller.model.formats.stored import read_config, stored_format


def read(family: str, drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    config = config_of(family, **changes)
    return read_hf_config({key: value for key, value in config.items() if key not in drop})


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "falcon"}, "'model_type' is 'falcon'"),
        ("llama", {"model_type": None}, "'model_type' is missing"),
        ("llama", {"model_type": ["llama"]}, "'model_type' is ['llama']; supported: "),
        ("llama", {"hidden_act": []}, "'hidden_act' is []; supported: "),
        ("llama", {"rope_scaling": []}, "'rope_scaling' is []; it must be one flat set"),
        ("llama", {"rms_norm_eps": -1e-5}, "'rms_norm_eps' is -1e-05; it must be from 0"),
        ("mistral", {"num_hidden_layers": 2**31 - 1}, "'num_hidden_layers' is 2147483647; it must be at most 65,536"),
        ("mistral", {"layer_types": "sliding_attention"}, "'layer_types' is 'sliding_attention'; it must be a list"),
        ("qwen2", {"max_window_layers": -1}, "'max_window_layers' is -1; it must be at least 0"),
        ("llama", {"hidden_act": "mish"}, "'hidden_act' is 'mish'"),
        ("llama", {"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ("llama", {"num_hidden_layers": "2"}, "'num_hidden_layers' is '2'; it must be an integer"),
        ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' is 0; it must be at least 1"),
        ("llama", {"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads ('num_attention_heads') cannot share 3 kv heads"),
        ("llama", {"head_dim": 15}, "'head_dim' is 15, which is odd"),
        ("llama", {"rms_norm_eps": "tiny"}, "'rms_norm_eps' is 'tiny'"),
        ("llama", {"attention_bias": 1}, "'attention_bias' is 1; it must be true or false"),
        ("llama", {"sliding_window": 8}, "'sliding_window' is 8; it changes the maths"),
        ("llama", {"quantization_config": {"bits": 4}}, "'quantization_config' is {'bits': 4}"),
        ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ("llama", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ("llama", {"num_local_experts": 8}, "'num_local_experts' is 8"),
        ("llama", {"rope_parameters": [1]}, "'rope_parameters' is [1]"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat set"),
        ("mistral", {"attention_bias": True}, "'attention_bias' is True; it changes the maths"),
        ("mistral", {"sliding_window": 0}, "'sliding_window' is 0"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'"),
        ("qwen2", {"mlp_bias": True}, "'mlp_bias' is True"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "no sliding window is set"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
            "'layer_types' has 1 entries for 2 layers",
        ),
        ("gpt2", {"n_embd": 66}, "'n_embd' is 66"),
        ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights' is False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True"),
        ("gpt2", {"add_cross_attention": True}, "'add_cross_attention' is True"),
        ("gpt2", {"activation_function": "mish"}, "'activation_function' is 'mish'"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(family, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "truncate": True}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}
ON = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"rope_parameters": YARN, "attention_bias": False, "mlp_bias": False}),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
        ("mistral", {"layer_types": ["sliding_attention"] * 2, "rope_theta": 1e4}),
        ("qwen2", ON | {"max_window_layers": 1}),
        ("qwen3", ON | {"layer_types": ["full_attention", "sliding_attention"], "quantization_config": None}),
        ("gpt2", {"tie_word_embeddings": True, "scale_attn_weights": True}),
    ],
)
def test_any_value_of_a_key_is_read_or_refused_in_one_line_that_names_a_key(family: str, more: dict[str, Any]) -> None:
    for what, raw in damaged(config_of(family, **more)):
        try:
            config = read_hf_config(raw)
        except ConfigError as error:
            assert re.search("'[a-z_.]+'", str(error)) and "\n" not in str(error), what
        else:
            assert len(config.windows) in (0, config.num_layers), what


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "foo", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_an_unsupported_rope_type_is_refused_by_name(kind: str, spelling: str) -> None:
    with pytest.raises(ConfigError, match=f"'rope_scaling.{spelling}' is '{kind}'; supported: 'default', 'linear'"):
        read("llama", drop=("rope_parameters",), rope_scaling={spelling: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear"}, "'rope_parameters.factor' is missing"),
        ({"rope_type": "linear", "factor": 0.0}, "RoPE 'factor' is 0.0"),
        (
            {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0},
            "'rope_parameters.low_freq_factor' is missing",
        ),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "'low_freq_factor'"),
        ({"rope_type": "yarn", "factor": "4"}, "'rope_parameters.factor' is '4'"),
        ({"rope_theta": -1.0}, "rope_theta' is -1.0"),
        ({"rope_theta": float("nan")}, "rope_theta' is nan"),
    ],
)
def test_a_rope_value_that_is_missing_or_impossible_is_named(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("llama", rope_parameters=rope)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {},
    ],
)
def test_older_and_newer_spellings_of_rope_mean_the_same(params: dict[str, Any]) -> None:
    newer = read("llama", rope_parameters={"rope_theta": 500.0, **params})
    older = read("llama", drop=("rope_parameters",), rope_theta=500.0, rope_scaling=params)
    oldest = {"type" if key == "rope_type" else key: value for key, value in params.items()}
    assert newer == older == read("llama", drop=("rope_parameters",), rope_theta=500.0, rope_scaling=oldest)
    assert newer.rope is not None and newer.rope.theta == 500.0


def test_yarn_without_attention_factor_gets_the_papers() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read("llama", rope_parameters=rope)
    assert config.rope is not None
    assert config.rope.attention_factor == pytest.approx(1.1386, abs=1e-4)  # 0.1 ln 4 + 1
    implied = read("llama", rope_parameters={key: value for key, value in rope.items() if key != "factor"})
    assert implied.rope is not None and implied.rope.factor == 4.0  # 256 / 64


def test_windows_follow_each_familys_keys() -> None:
    assert read("llama").windows == ()
    assert read("mistral").windows == (8, 8)
    assert read("mistral", sliding_window=None).windows == ()
    assert read("mistral", drop=("sliding_window",)).windows == (4096, 4096)  # what the family presumes
    assert read("qwen2", sliding_window=8).windows == ()  # use_sliding_window is off
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert read("qwen2", **on, max_window_layers=1).windows == (None, 8)
    assert read("qwen2", **on, max_window_layers=2).windows == ()
    assert read("qwen3", **on, layer_types=["sliding_attention", "full_attention"]).windows == (8, None)


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[1]", "[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_file_that_is_no_json_object_is_one_line_for_the_plan_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for read_it in (read_config, stored_format):
        with pytest.raises(ConfigError) as caught:
            read_it(str(tmp_path))
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(caught.value)


def test_unknown_keys_are_warned_about_once_and_harmless_ones_never(caplog: pytest.LogCaptureFixture) -> None:
    read("llama", use_cache=True, torch_dtype="float32", pretraining_tp=1, transformers_version="5")
    assert caplog.text == ""
    read("llama", wonder=1, marvel=2)
    assert len(caplog.records) == 1 and "marvel, wonder" in caplog.text


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_weight_bytes_are_counted_from_the_config_alone(tmp_path: Path, family: str, tied: bool) -> None:
    raw = config_of(family, tie_word_embeddings=tied)
    weights = load_file(random_hf(tmp_path, raw) / "model.safetensors")
    config = read_hf_config(raw)
    assert config.num_parameters == sum(tensor.numel() for tensor in weights.values())
    vectors = sum(tensor.numel() for tensor in weights.values() if tensor.ndim == 1)
    assert config.weight_bytes("fp32") == 4 * config.num_parameters
    assert config.weight_bytes("bf16") == 2 * config.num_parameters + 2 * vectors


def test_int8_takes_a_byte_a_number_and_a_scale_for_64() -> None:
    config = ModelConfig(1000, 96, 160, 1, 3, 1, 32, max_context=64, tied_embeddings=True)
    rows = {(160, 96): 2, (96, 96): 2, (320, 96): 2, (96, 160): 3, (1000, 96): 2}  # [out, in]: groups a row
    expected = sum(out * columns + 4 * out * groups for (out, columns), groups in rows.items())
    assert config.weight_bytes("int8") == expected + 4 * 3 * 96


def test_families_differ_in_values_only() -> None:
    qwen3, gpt2 = read("qwen3"), read("gpt2")
    assert (qwen3.norm, qwen3.qk_norm, qwen3.gated_mlp, qwen3.rope) == ("rms", True, True, Rope(10_000.0))
    assert (gpt2.norm, gpt2.qkv_bias, gpt2.gated_mlp, gpt2.rope) == ("layer", True, False, None)
    assert read("qwen2").qkv_bias and not read("qwen2").out_bias


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
}
LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "pretraining_tp": 1}
LLAMA |= {"rms_norm_eps": 1e-5, "rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True}
QWEN = LLAMA | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151_936, "use_sliding_window": False}
QWEN |= {"tie_word_embeddings": True, "transformers_version": "4.43.1"}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}


def shape(width: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


# config.json of published models, and the number of parameters that they are known to have
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        LLAMA
        | shape(576, 1536, 30, 9, 3, 8192)
        | {"vocab_size": 49_152, "rope_theta": 100_000, "tie_word_embeddings": True, "mlp_bias": False}
        | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        134_515_008,
    ),
    "TinyLlama-1.1B": (
        LLAMA | shape(2048, 5632, 22, 32, 4, 2048) | {"vocab_size": 32_000, "tie_word_embeddings": False},
        1_100_048_384,
    ),
    "Llama-3.2-1B": (
        LLAMA
        | shape(2048, 8192, 16, 32, 8, 131_072)
        | {"vocab_size": 128_256, "rope_theta": 500_000.0, "tie_word_embeddings": True, "head_dim": 64}
        | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}, "eos_token_id": [128_001, 128_009]},
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {key: LLAMA[key] for key in LLAMA if "attention" not in key and key != "rope_scaling"}
        | shape(4096, 14_336, 32, 32, 8, 32_768)
        | {"model_type": "mistral", "vocab_size": 32_000, "sliding_window": 4096, "tie_word_embeddings": False},
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {key: QWEN[key] for key in QWEN if key != "attention_bias"}
        | shape(896, 4864, 24, 14, 2, 32_768)
        | {"model_type": "qwen2", "sliding_window": 32_768, "max_window_layers": 21},
        494_032_768,
    ),
    "Qwen3-0.6B": (
        QWEN
        | shape(1024, 3072, 28, 16, 8, 40_960)
        | {"model_type": "qwen3", "head_dim": 128, "sliding_window": None, "max_window_layers": 28},
        596_049_920,
    ),
    "gpt2": (
        {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "n_ctx": 1024}
        | {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50_257}
        | {
            "layer_norm_epsilon": 1e-5,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {},
        },
        124_439_808,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_without_a_warning_and_count_their_known_parameters(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw, parameters = PUBLISHED[name]
    assert read_hf_config(raw).num_parameters == parameters
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", ("fp32", "as stored, float32", "fp32")),
        ("float16", ("fp16", "as stored, float16", "fp16")),
        ("bfloat16", ("bf16", "as stored, bfloat16", "fp16")),
        ("float8_e4m3fn", ("fp16", "nearest to float8_e4m3fn", "fp16")),
        (None, ("fp32", "config.json names no dtype", "fp32")),
    ],
)
def test_auto_keeps_what_the_file_stores(tmp_path: Path, dtype: str | None, expected: tuple[str, str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", dtype=dtype)))
    assert stored_format(str(tmp_path)) == expected


def test_the_toy_keeps_k_and_v_in_fp32() -> None:
    assert stored_format("toy") == ("fp16", "as stored, float16", "fp32")
