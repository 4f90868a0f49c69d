"""GGUF metadata in the words of a Hugging Face config.json, which `hf_config.py` turns into a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from tokenteller.model.formats.keys import Keys

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")


def hf_config(metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """`tensors` are the names of all tensors. Raises ConfigError naming the key that is missing or not supported."""
    general = Keys(metadata)
    arch = general.one_of("general.architecture", ARCHITECTURES)
    keys = general.below(f"{arch}.")
    shared = {
        "vocab_size": len(general.list_of(str, "tokenizer.ggml.tokens", [])) or keys.integer("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if arch == "gpt2":
        return shared | {
            "model_type": "gpt2",
            "n_embd": width,
            "n_inner": keys.integer("feed_forward_length"),
            "n_layer": keys.integer("block_count"),
            "n_head": heads,
            "n_positions": keys.integer("context_length", least=2),
            "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        }
    dim = keys.integer("attention.key_length", keys.integer("rope.dimension_count", width // heads))
    for name, supported in (("attention.value_length", dim), ("rope.dimension_count", dim), ("expert_count", 0)):
        keys.only(name, supported)
    return (
        shared
        | {
            "model_type": arch,
            "hidden_size": width,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
            "head_dim": dim,
            "max_position_embeddings": keys.integer("context_length", least=2),
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": _rope(keys),
        }
        | _biases_and_windows(arch, keys, tensors)
    )


def _rope(keys: Keys) -> dict[str, Any]:
    """RoPE in the words of `rope_parameters`. llama3 scaling is not here but in the tensor `rope_freqs.weight`."""
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10_000.0)}
    kind = keys.one_of("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if kind == "none":
        keys.only("rope.scale_linear", 1.0)
        return rope
    factor = keys.number("rope.scaling.factor")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        keys.only("rope.scaling.yarn_log_multiplier", 0.0)
        keys.only("rope.scaling.yarn_ext_factor", 1.0)
        rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[name] = keys.number(f"rope.scaling.yarn_{name}", usual)
        more = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
        if more != 1.0:
            rope["attention_factor"] = more * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return rope


def _biases_and_windows(arch: str, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
    """Biases, which GGUF does not declare but stores as tensors, and sliding windows."""
    if arch in ("qwen2", "qwen3"):
        keys.only("attention.sliding_window", 0)  # the file does not say which layers have it
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if arch == "qwen2":
        return {}
    if arch == "qwen3":
        return biases
    window = keys.integer("attention.sliding_window", 0, least=0)
    if window:  # Mistral, in every layer
        return {"model_type": "mistral", "sliding_window": window}
    return biases | {"mlp_bias": "blk.0.ffn_up.bias" in tensors}
