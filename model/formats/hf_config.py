"""config.json of Hugging Face checkpoints -> ModelConfig.

A key that changes the maths is honoured or refused by name (hf_keys.py). To add a family, write one reader and enter it
in FAMILIES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokenteller.model.config import Activation, ModelConfig, Rope
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.hf_keys import refuse_unread
from tokenteller.model.formats.keys import Keys

MAX_LAYERS = 65_536  # a bound on `num_hidden_layers`, since windows are listed per layer


def read_hf_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError for anything that would change the maths and is not supported."""
    family = Keys(raw).one_of("model_type", FAMILIES)
    keys = Keys(raw, _DEFAULTS.get(family, {}))
    config = FAMILIES[family](keys)
    refuse_unread(keys)
    return config


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _activation(keys: Keys, key: str, default: str) -> Activation:
    return _ACTIVATIONS[keys.one_of(key, _ACTIVATIONS, default)]


def _llama(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _rotary(keys, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def _mistral(keys: Keys) -> ModelConfig:
    config = _rotary(keys, windows=())
    window = _window(keys)
    windows = () if window is None else (window,) * config.num_layers
    if keys.get("layer_types") is not None and _windows_of(keys, window) != windows:
        raise ConfigError(f"key 'layer_types' contradicts 'sliding_window' {window}; in mistral every layer has it")
    return replace(config, windows=windows)


def _qwen2(keys: Keys) -> ModelConfig:
    return _rotary(keys, qkv_bias=True, windows=_qwen_windows(keys))


def _qwen3(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _rotary(keys, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_qwen_windows(keys))


def _rotary(keys: Keys, **family: Any) -> ModelConfig:
    """Llama and its descendants: RMSNorm, RoPE, a gated MLP."""
    heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    context = keys.integer("max_position_embeddings", 2048, least=2)
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        width=width,
        mlp_width=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", width // heads),
        max_context=context,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=_activation(keys, "hidden_act", "silu"),
        rope=_rope(keys, context),
        tied_embeddings=keys.flag("tie_word_embeddings"),
        **family,
    )


def _gpt2(keys: Keys) -> ModelConfig:
    heads, width = keys.integer("n_head"), keys.integer("n_embd")
    if width % heads:
        raise keys.wrong("n_embd", f"{heads} heads (key 'n_head') cannot share it evenly")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        width=width,
        mlp_width=keys.integer("n_inner", 4 * width),
        num_layers=keys.integer("n_layer", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_context=keys.integer("n_positions", 1024, least=2),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=_activation(keys, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=keys.flag("tie_word_embeddings", True),
    )


# What absent keys mean, by family: the defaults of the reference implementation.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
}

FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}


def _window(keys: Keys) -> int | None:
    return None if keys.get("sliding_window") is None else keys.integer("sliding_window")


def _qwen_windows(keys: Keys) -> tuple[int | None, ...]:
    """Which layers have the window: those named by `layer_types`, else all from `max_window_layers` on."""
    window, layers = _window(keys), keys.integer("num_hidden_layers", most=MAX_LAYERS)
    first = keys.integer("max_window_layers", 28, least=0)
    if not keys.flag("use_sliding_window"):
        window = None
    if keys.get("layer_types") is not None:
        return _windows_of(keys, window)
    windows = tuple(window if layer >= first else None for layer in range(layers))
    return windows if any(windows) else ()


def _windows_of(keys: Keys, window: int | None) -> tuple[int | None, ...]:
    """`layer_types` as a window per layer. Raises ConfigError for an unsupported type."""
    known = ("full_attention", "sliding_attention")
    kinds = keys.list_of(str, "layer_types")
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"key 'layer_types' has {kind!r:.80}; supported: {', '.join(map(repr, known))}")
        if kind == "sliding_attention" and window is None:
            raise ConfigError("key 'layer_types' has 'sliding_attention', but no sliding window is set")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _rope(keys: Keys, context: int) -> Rope:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta` in older files."""
    newer, older = keys.flat("rope_parameters"), keys.flat("rope_scaling")
    name, params = ("rope_scaling", older) if older else ("rope_parameters", newer)
    defaults = {"rope_theta": keys.get("rope_theta", 10_000.0)}
    if keys.get("original_max_position_embeddings") is not None:
        params = params | {"original_max_position_embeddings": keys.integer("original_max_position_embeddings")}
    return _rope_of(Keys(params, defaults, inside=f"{name}."), context)


def _rope_of(keys: Keys, context: int) -> Rope:
    """`context` is the trained context where the file gives none, as in the reference implementation."""
    spelled = "type" if keys.get("rope_type") is None else "rope_type"  # the older spelling
    kind = keys.one_of(spelled, ("default", "linear", "llama3", "yarn"), "default")
    theta = keys.number("rope_theta")
    keys.only("partial_rotary_factor", 1.0)
    if kind == "linear":
        rope = Rope(theta, "linear", keys.number("factor"))
    elif kind == "llama3":
        rope = Rope(
            theta,
            "llama3",
            keys.number("factor"),
            keys.integer("original_max_position_embeddings", context),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
        )
    elif kind == "yarn":
        rope = _yarn(keys, theta, context)
    else:
        rope = Rope(theta)
    refuse_unread(keys)
    return rope


def _yarn(keys: Keys, theta: float, context: int) -> Rope:
    original = keys.integer("original_max_position_embeddings", context)
    factor = keys.number("factor", context / max(original, 1))

    def magnitude(scale: float) -> float:
        """The scale of cos and sin (Peng et al. 2023, equation 22)."""
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    inferred = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=keys.number("beta_fast", 32.0) or 32.0,
        beta_slow=keys.number("beta_slow", 1.0) or 1.0,
        truncate=keys.flag("truncate", True),
        attention_factor=keys.number("attention_factor", inferred),
    )
