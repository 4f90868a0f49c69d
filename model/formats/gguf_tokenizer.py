"""The tokenizer in GGUF metadata. To add a byte-level pre-tokenizer, enter its name in one of the tuples below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from tokenteller.model.formats.gguf import GGUFError
from tokenteller.model.formats.keys import Keys

# values of `tokenizer.ggml.pre`, by how they split text before merging
_GPT2 = ("gpt-2", "olmo", "phi-2", "mpt")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_QWEN = ("qwen2", "deepseek-r1-qwen")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # token types


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer and its special tokens. `bos` is None where text is encoded without one."""

    backend: Tokenizer
    bos: int | None
    ends: frozenset[int]
    chat_template: str | None
    names: dict[str, str]  # special tokens under the names chat templates use


def read_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """From the `tokenizer.*` keys. Raises ConfigError naming the key."""
    keys = Keys(metadata).below("tokenizer.ggml.")
    tokens = keys.list_of(str, "tokens")
    if len(set(tokens)) < len(tokens):
        text, count = Counter(filter(None, tokens)).most_common(1)[0] if any(tokens) else ("", 1)
        if count > 1:
            raise GGUFError(f"key 'tokenizer.ggml.tokens' has {text!r:.80} {count} times")
    types = keys.list_of(int, "token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise GGUFError(f"key 'tokenizer.ggml.token_type' has {len(types)} types for {len(tokens)} tokens")
    words = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {
        name: keys.integer(f"{name}_token_id", least=0, most=len(tokens) - 1)
        for name in (*words, "eot", "eom")
        if keys.get(f"{name}_token_id") is not None
    }
    if keys.one_of("model", ("gpt2", "llama")) == "gpt2":
        backend, adds_bos = _byte_level(keys, tokens), keys.get("pre") in _LLAMA3
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
        names={word: tokens[ids[name]] for name, word in words.items() if name in ids},
    )


def _byte_level(keys: Keys, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019)."""
    pre = keys.one_of("pre", (*_GPT2, *_SINGLE_DIGITS, *_QWEN, *_LLAMA3))
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in keys.list_of(str, "merges", []))]
    vocab = {text: at for at, text in enumerate(tokens)}
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    except Exception as error:  # tokenizers raises nothing more specific
        raise keys.wrong("merges", f"{error}") from error
    if pre in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SINGLE_DIGITS:
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    else:
        numbers = r"\p{N}{1,3}" if pre in _LLAMA3 else r"\p{N}"
        pattern = Regex("|".join((_CONTRACTIONS, _WORDS, numbers, _REST)))
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bare])
        if pre in _QWEN:
            backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: Keys, tokens: list[str], types: list[int], unknown: int) -> Tokenizer:
    """SentencePiece BPE with byte fallback: any two pieces that form a piece may merge, the best score first."""
    scores = keys.list_of(float, "scores")
    if len(scores) != len(tokens):
        raise GGUFError(f"key 'tokenizer.ggml.scores' has {len(scores)} scores for {len(tokens)} tokens")
    vocab = {text: at for at, text in enumerate(tokens)}
    control = {text for text, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL}  # never made from text
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
