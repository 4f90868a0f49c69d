"""GGUF files: header, tensors, and the tokenizer that stands in the metadata. Torch-free.

The header is read here and not by `gguf.GGUFReader`: that takes seconds for the 98,000 strings of a small vocabulary,
this a tenth of one. Blocks are decoded by `gguf.quants`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from tokenteller.model.keys import ConfigError, Keys


class GGUFError(ConfigError):
    """A file that is no GGUF, is cut short, or holds what is not supported."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file and how it is stored; `shape` as in PyTorch, rows first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    length: int


_PIECE = 4096  # rows of a tensor that are decoded at once

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFFile:
    """An opened file: `metadata` by key, `tensors` by name. Data is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises GGUFError, or OSError where the file cannot be opened."""
        with open(path, "rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file
                raise GGUFError("the file is empty") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise GGUFError(f"not a GGUF header, or cut short, at byte {self._at:,}") from error

    def _read_header(self) -> None:
        magic, version = self._bytes[:4], self._unpack("I", at=4)
        if magic != b"GGUF":
            raise GGUFError("not a GGUF file: it does not begin with 'GGUF'")
        if version not in (2, 3):
            raise GGUFError(f"GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
        self._at = 8
        tensors, pairs = self._unpack("Q"), self._unpack("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        keys = Keys(self.metadata)
        alignment = keys.integer("general.alignment", 32)
        if alignment % 8:
            raise keys.wrong("general.alignment", "it must be a multiple of 8")
        data = -(-self._at // alignment) * alignment
        for name, _, _, offset in infos:
            if offset % alignment:
                raise GGUFError(
                    f"tensor {name!r} begins {offset:,} bytes into the data; 'general.alignment' is {alignment}"
                )
        self.tensors = {name: self._located(name, data, shape, kind, offset) for name, shape, kind, offset in infos}
        if len(self.tensors) != len(infos):
            raise GGUFError("two tensors have the same name")

    def _unpack(self, code: str, at: int | None = None) -> Any:
        size = struct.calcsize("<" + code)
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at if at is None else at)
        self._at += size
        return value

    def _string(self) -> str:
        length = self._unpack("Q")
        raw = self._bytes[self._at : self._at + length]
        if len(raw) != length:
            raise GGUFError(f"cut short: a string of {length:,} bytes at byte {self._at:,}")
        self._at += length
        return raw.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind != _ARRAY:
            raise GGUFError(f"metadata of unknown type {kind} at byte {self._at:,}")
        element, count = self._unpack("I"), self._unpack("Q")
        if count > len(self._bytes) - self._at:
            raise GGUFError(f"cut short: an array of {count:,} elements at byte {self._at:,}")
        if element not in _SCALARS:
            return [self._value(element) for _ in range(count)]
        values = np.frombuffer(self._bytes, np.dtype(_SCALARS[element]).newbyteorder("<"), count, self._at)
        self._at += values.nbytes
        return values.tolist()

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._unpack("I")
        if not 1 <= dimensions <= 4:
            raise GGUFError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(dimensions))[::-1]  # the file has the fastest one first
        return name, shape, self._unpack("I"), self._unpack("Q")

    def _located(self, name: str, data: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            stored = GGMLQuantizationType(kind)
        except ValueError as error:
            raise GGUFError(f"tensor {name!r} is stored in unknown type {kind}") from error
        block, size = GGML_QUANT_SIZES[stored]
        if shape[-1] % block:
            raise GGUFError(f"tensor {name!r}: rows of {shape[-1]} do not divide into {stored.name} blocks of {block}")
        length = math.prod(shape) // block * size
        if data + offset + length > len(self._bytes):
            raise GGUFError(
                f"tensor {name!r} ends at byte {data + offset + length:,}, but the file has {len(self._bytes):,}"
            )
        return TensorInfo(shape, stored, data + offset, length)

    def read(self, name: str) -> NDArray[Any]:
        """One tensor, decoded to fp32 (fp16 where it is stored so)."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.length, info.start)
        if info.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            dtype = np.float32 if info.kind == GGMLQuantizationType.F32 else np.float16
            return raw.view(dtype).reshape(info.shape).copy()
        values = np.empty((math.prod(info.shape[:-1]), info.shape[-1]), np.float32)
        rows = raw.reshape(len(values), -1)
        try:
            for at in range(0, len(rows), _PIECE):  # some rows at a time, for the library needs room for them twice
                values[at : at + _PIECE] = dequantize(rows[at : at + _PIECE], info.kind)
        except NotImplementedError as error:
            raise GGUFError(f"tensor {name!r} is stored as {info.kind.name}, which cannot be decoded") from error
        page = info.start % mmap.ALLOCATIONGRANULARITY
        with suppress(AttributeError):  # not on Windows
            self._bytes.madvise(mmap.MADV_DONTNEED, info.start - page, info.length + page)  # the pages just read
        return values.reshape(info.shape)


def _under(metadata: Mapping[str, Any], prefix: str) -> Keys:
    """The keys that begin with `prefix`, without it."""
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Keys(own, inside=prefix)


def hf_config(metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The header in the words of a Hugging Face config.json. Raises ConfigError naming the key that is missing or
    odd."""
    general = Keys(metadata)
    arch = general.one_of("general.architecture", ("llama", "qwen2", "qwen3", "gpt2"))
    if general.integer("split.count", 1, least=0) > 1:
        raise general.wrong("split.count", "one of several parts; join them to one file")
    keys = _under(metadata, f"{arch}.")
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
    for name, must in (("attention.value_length", dim), ("rope.dimension_count", dim), ("expert_count", 0)):
        keys.only(name, must)
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
    """RoPE in the words of `rope_parameters`. The factors of llama3 stand in the tensor `rope_freqs.weight` instead."""
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
    """What Hugging Face says in the config and GGUF by the tensors that are there."""
    if arch in ("qwen2", "qwen3"):
        keys.only("attention.sliding_window", 0)  # which layers have it is not in the file
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if arch == "qwen2":
        return {}
    if arch == "qwen3":
        return biases
    window = keys.integer("attention.sliding_window", 0, least=0)
    if window:  # Mistral: all layers
        return {"model_type": "mistral", "sliding_window": window}
    return biases | {"mlp_bias": "blk.0.ffn_up.bias" in tensors}


_GPT2_LIKE = ("gpt-2", "olmo", "phi-2", "mpt")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
_QWEN_LIKE = ("qwen2", "deepseek-r1-qwen")
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # token types


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The tokenizer of a file, and what stands beside it. `bos` is None where none is put in front of a text."""

    backend: Tokenizer
    bos: int | None
    ends: frozenset[int]
    chat_template: str | None
    names: dict[str, str]  # what a chat template calls them


def read_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """From the `tokenizer.*` keys. Raises ConfigError naming the key of a kind that is not known here."""
    keys = _under(metadata, "tokenizer.ggml.")
    tokens = keys.list_of(str, "tokens")
    text, count = Counter(filter(None, tokens)).most_common(1)[0] if any(tokens) else ("", 1)
    if count > 1:
        raise GGUFError(f"key 'tokenizer.ggml.tokens' has {text!r:.80} {count} times")
    types = keys.list_of(int, "token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise GGUFError(f"key 'tokenizer.ggml.token_type' has {len(types)} types for {len(tokens)} tokens")
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {
        name: keys.integer(f"{name}_token_id", least=0, most=len(tokens) - 1)
        for name in (*named, "eot", "eom")
        if keys.get(f"{name}_token_id") is not None
    }
    if keys.one_of("model", ("gpt2", "llama")) == "gpt2":
        backend, adds_bos = _byte_level(keys, tokens), keys.get("pre") in _LLAMA3_LIKE
    else:
        backend, adds_bos = _sentencepiece(keys, tokens, types, ids.get("unknown", 0)), True
    for special in (True, False):
        wanted = _CONTROL if special else _USER_DEFINED
        found = [text for text, type_ in zip(tokens, types, strict=True) if type_ == wanted]
        backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in found])
    return GGUFTokenizer(
        backend,
        bos=ids.get("bos") if keys.flag("add_bos_token", adds_bos) else None,
        ends=frozenset(ids[name] for name in ("eos", "eot", "eom") if name in ids),
        chat_template=Keys(metadata).text("tokenizer.chat_template"),
        names={word: tokens[ids[name]] for name, word in named.items() if name in ids},
    )


def _byte_level(keys: Keys, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019); `pre` names how text is cut before merging."""
    pre = keys.one_of("pre", (*_GPT2_LIKE, *_DIGITS_APART, *_QWEN_LIKE, *_LLAMA3_LIKE))
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in keys.list_of(str, "merges", []))]
    vocab = {text: at for at, text in enumerate(tokens)}
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_LIKE))
    except Exception as error:  # tokenizers has no other
        raise keys.wrong("merges", f"{error}") from error
    if pre in _GPT2_LIKE:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS_APART:
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    else:
        numbers = r"\p{N}{1,3}" if pre in _LLAMA3_LIKE else r"\p{N}"
        pattern = Regex("|".join((_CONTRACTIONS, _WORDS, numbers, _REST)))
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bare])
        if pre in _QWEN_LIKE:
            backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: Keys, tokens: list[str], types: list[int], unknown: int) -> Tokenizer:
    """SentencePiece BPE with byte fallback: a pair is merged when it is a piece, the best score first."""
    scores = keys.list_of(float, "scores")
    if len(scores) != len(tokens):
        raise GGUFError(f"key 'tokenizer.ggml.scores' has {len(scores)} scores for {len(tokens)} tokens")
    vocab = {text: at for at, text in enumerate(tokens)}
    control = {text for text, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL}  # no text becomes one
    ranked = sorted(
        (-scores[at], vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text, at in vocab.items()
        for cut in range(1, len(text) if text not in control else 0)
        if text[:cut] in vocab and text[cut:] in vocab
    )
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = keys.flag("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if prefix else "never", split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return backend
