"""Small checkpoints made on the spot: a byte tokenizer and seeded random Llama weights, in Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = 264
BOS, EOS = 256, 257


def byte_tokenizer() -> Tokenizer:
    """One token per byte (id = byte), no merges; specials from 256 on. So every count is known by hand."""
    alphabet = sorted(ByteLevel.alphabet())
    order = {text: byte for byte, text in enumerate(_byte_symbols())}
    assert sorted(order) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab=order, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019): itself where printable."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols, spare = [], 256
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def llama_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    return config | changes


def random_llama(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama checkpoint with norm weights that are not 1, so that a forgotten norm shows."""
    config = llama_config(**changes)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.2, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale + mean

    e, m, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    weights = {"model.embed_tokens.weight": normal(v, e, scale=1.0), "model.norm.weight": normal(e, mean=1.0)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(v, e)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": normal(q, e),
            f"{at}.self_attn.k_proj.weight": normal(kv, e),
            f"{at}.self_attn.v_proj.weight": normal(kv, e),
            f"{at}.self_attn.o_proj.weight": normal(e, q),
            f"{at}.mlp.gate_proj.weight": normal(m, e),
            f"{at}.mlp.up_proj.weight": normal(m, e),
            f"{at}.mlp.down_proj.weight": normal(e, m),
            f"{at}.input_layernorm.weight": normal(e, mean=1.0),
            f"{at}.post_attention_layernorm.weight": normal(e, mean=1.0),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory
