"""Small checkpoints made on the spot, in Hugging Face form: random weights of every family, and a scripted one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = 264
# values that few keys accept
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31 - 1,
    2**40,
    10**30,
    1.5,
    -1e-3,
    float("nan"),
    float("inf"),
)
ODD += ("", "x", "\ud800", [], [1], ["x"], [None], [[]], {}, {"a": 1}, {"content": 5})
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


def damaged(whole: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a dict or list with one value replaced, for each value at any depth, and where that was.

    Of long lists the first two, of a vocabulary the first 50.
    """
    for key in list(whole)[:50] if isinstance(whole, dict) else range(min(2, len(whole))):
        for odd in ODD:
            other = copy.copy(whole)
            other[key] = odd
            yield f"{key}: {odd!r}", other
        if isinstance(whole[key], dict | list):
            for inner, part in damaged(whole[key]):
                other = copy.copy(whole)
                other[key] = part
                yield f"{key}.{inner}", other


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
    return write(directory, config, weights)


def write(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint directory with the byte tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def edited(directory: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """Replaces, adds or (None) drops tensors of a single-file checkpoint, and changes keys of its config."""
    file = directory / "model.safetensors"
    weights = load_file(file) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in weights.items() if changes.get(name, tensor) is not None}, file)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def tape(directory: Path, script: str | Sequence[int], context: int = 64) -> Path:
    """A GPT-2 checkpoint that plays a tape: greedily, the token after position p is script[p], whatever came before.

    So a prompt of L tokens is continued by script[L - 1], script[L], ... A string is played as its UTF-8 bytes; after
    the script comes `<|eos|>`. All weights are 0 except norm gains (1), token embeddings (the identity; the head is
    tied) and position embeddings (10 at the scripted token). A fault in any position shows as a wrong byte.
    """
    played = list(script.encode() if isinstance(script, str) else script)
    assert len(played) <= context, (len(played), context)
    config = gpt2_config(n_embd=VOCAB, n_positions=context, n_ctx=context)
    e = VOCAB
    weights = {"transformer.wte.weight": torch.eye(e), "transformer.wpe.weight": torch.zeros(context, e)}
    for position, token in enumerate(played + [EOS] * (context - len(played))):
        weights["transformer.wpe.weight"][position, token] = 10.0
    norms = [f"h.{layer}.ln_{which}" for layer in range(2) for which in (1, 2)] + ["ln_f"]
    for norm in norms:
        weights |= {f"transformer.{norm}.weight": torch.ones(e), f"transformer.{norm}.bias": torch.zeros(e)}
    shapes = {"attn.c_attn": (e, 3 * e), "attn.c_proj": (e, e), "mlp.c_fc": (e, 4), "mlp.c_proj": (4, e)}
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            at = f"transformer.h.{layer}.{name}"
            weights |= {f"{at}.weight": torch.zeros(rows, columns), f"{at}.bias": torch.zeros(columns)}
    return write(directory, config | {"n_inner": 4}, weights)


def gpt2_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_inner": 96,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    return config | changes


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A small config of any supported family; GPT-2 names its keys differently."""
    if family == "gpt2":
        return gpt2_config(**changes)
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": 8},
        "qwen2": {},
        "qwen3": {"rms_norm_eps": 1e-2},  # large, so that a norm with another one shows
    }
    return llama_config(architectures=None, model_type=family, **own[family]) | changes


def random_hf(directory: Path, config: dict[str, Any], seed: int = 0, **save: Any) -> Path:
    """A random checkpoint written by transformers itself, biases and norm weights randomised too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, scale = (1.0, 0.2) if "norm" in name or "ln_" in name else (0.0, 0.2)
            scale = 1.0 if "embed_tokens" in name or "wte" in name else scale
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + mean)
    write(directory, config)
    model.save_pretrained(directory, **save)
    return directory


def to_gguf(directory: Path, path: Path, kind: Kind = Kind.F32, more: dict[str, Any] | None = None) -> Path:
    """The same checkpoint as llama.cpp's converter would write it: its names, its order of q and k rows.

    Norms, biases and tensors whose rows do not divide into blocks of `kind` stay F32. `more` adds metadata, or (None)
    leaves it out.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    layers = config.get("num_hidden_layers") or config["n_layer"]
    writer = gguf.GGUFWriter(path, arch)
    metadata = _gguf_config(config, arch) | _gguf_vocabulary() | (more or {})
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], layers)
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    for name, tensor in load_file(directory / "model.safetensors").items():
        array = tensor.float().numpy()
        if arch == "gpt2" and ".c_" in name:
            array = array.T
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            shape = array.shape
            array = array.reshape(heads[projection], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        block = gguf.GGML_QUANT_SIZES[kind][0]
        stored = kind if array.ndim > 1 and array.shape[-1] % block == 0 else Kind.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array), stored)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_config(config: dict[str, Any], arch: str) -> dict[str, Any]:
    gpt2 = arch == "gpt2"
    names = {
        "context_length": "n_positions" if gpt2 else "max_position_embeddings",
        "embedding_length": "n_embd" if gpt2 else "hidden_size",
        "feed_forward_length": "n_inner" if gpt2 else "intermediate_size",
        "block_count": "n_layer" if gpt2 else "num_hidden_layers",
        "attention.head_count": "n_head" if gpt2 else "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "rope.dimension_count": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "attention.sliding_window": "sliding_window",
    }
    found = {f"{arch}.{key}": config[name] for key, name in names.items() if name in config}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
        if rope["rope_type"] == "yarn":
            found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _gguf_vocabulary() -> dict[str, Any]:
    """The byte tokenizer."""
    specials = {token.content: id for id, token in byte_tokenizer().get_added_tokens_decoder().items()}
    tokens = [*_byte_symbols(), *specials]
    tokens += [f"[PAD{at}]" for at in range(len(tokens), VOCAB)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(specials) + [5] * (VOCAB - 256 - len(specials)),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
    }
