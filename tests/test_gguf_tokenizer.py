"""Tokenizers from GGUF metadata give the ids of their twins, and errors name the key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import damaged, random_llama, to_gguf
from test_gguf import YARN
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.gguf import GGUFError, GGUFFile
from tokenteller.model.formats.gguf_config import hf_config
from tokenteller.model.formats.gguf_tokenizer import read_tokenizer
from tokenteller.model.formats.hf_config import read_hf_config

TEXTS = [
    "Hello world! 123 café 🙂",
    "  leading and   inner spaces ",
    "I'm don't WE'LL it's",
    "tabs\tand\n\nnewlines\r\n end",
    "1234567 12.5 ½ ２３ Ⅷ",
    "日本語のテキスト e\u0301 naïve",
    "snake_case(CamelCase)->x=3;",
    "",
    " ",
]


def trained(pre: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """A byte-level BPE of some hundred merges, cut as `pre` does."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """A byte-level tokenizer as a converter writes it."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }


def split(pattern: str) -> Any:
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bare])


# the patterns in the tokenizer.json of Llama 3 and of Qwen2
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS: dict[str, Tokenizer] = {
    "gpt-2": trained(BYTE_LEVEL),
    "smollm": trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])),
    "llama-bpe": trained(split(LLAMA3), ignore_merges=True),
    "qwen2": trained(split(QWEN2), normalizers.NFC()),
}


@pytest.mark.parametrize("pre", KINDS)
def test_a_byte_level_tokenizer_from_metadata_gives_the_ids_of_its_twin(pre: str) -> None:
    theirs = KINDS[pre]
    ours = read_tokenizer(metadata_of(theirs, pre)).backend
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_each_pre_tokenizer_splits_differently() -> None:
    """Otherwise the test above would not notice two that are swapped."""
    metadata = metadata_of(KINDS["gpt-2"], "gpt-2")
    cut = {pre: read_tokenizer(metadata | {"tokenizer.ggml.pre": pre}).backend.pre_tokenizer for pre in KINDS}
    pieces = {str([cut[pre].pre_tokenize_str(text) for text in TEXTS]) for pre in KINDS}
    assert len(pieces) == len(KINDS)


def test_bos_and_ends_follow_the_metadata() -> None:
    metadata = metadata_of(KINDS["gpt-2"], "gpt-2")
    assert read_tokenizer(metadata).bos is None
    assert read_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": True}).bos == 0
    assert read_tokenizer(metadata).ends == {0, 1}
    llama3 = metadata_of(KINDS["llama-bpe"], "llama-bpe")
    assert read_tokenizer(llama3).bos == 0  # what this kind does where the flag is absent
    assert read_tokenizer(llama3 | {"tokenizer.ggml.add_bos_token": False}).bos is None


def sentencepiece() -> Tokenizer:
    """A SentencePiece-like BPE with byte fallback, as Llama 2 has it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(chain)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator([text for text in TEXTS if text.isascii()] * 3, trainer)
    state = json.loads(tokenizer.to_str())  # bytes are plain pieces, not special tokens
    state["added_tokens"] = state["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(state))


@pytest.fixture
def spm() -> dict[str, Any]:
    """The same as a converter writes it."""
    model = json.loads(sentencepiece().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merged = ["".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(merged.index(token)) if token in merged else -1e6 for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_a_sentencepiece_tokenizer_from_scores_gives_the_ids_of_its_twin(spm: dict[str, Any]) -> None:
    theirs = sentencepiece()
    found = read_tokenizer(spm)
    assert (found.bos, found.ends) == (1, {2})
    for text in [*TEXTS, "<s> is text </s>"]:
        found.backend.encode_special_tokens = theirs.encode_special_tokens = True
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert found.backend.encode(text, add_special_tokens=False).ids == ids, text
        assert not {1, 2} & set(ids)
        assert found.backend.decode(ids) == theirs.decode(ids)
    bare = read_tokenizer(spm | {"tokenizer.ggml.add_space_prefix": False}).backend
    assert bare.decode(bare.encode("end").ids) == "end" != bare.decode(found.backend.encode("end").ids)
    with pytest.raises(GGUFError, match=r"'tokenizer\.ggml\.scores' has 1 scores for "):
        read_tokenizer(spm | {"tokenizer.ggml.scores": [0.0]})


def test_any_value_in_the_metadata_is_read_or_refused_in_one_line_that_names_a_key(
    tmp_path: Path, spm: dict[str, Any]
) -> None:
    more = YARN | {"tokenizer.ggml.merges": ['! "'], "tokenizer.chat_template": "a", "split.count": 1}
    more |= {"tokenizer.ggml.unknown_token_id": 3, "llama.attention.sliding_window": 0, "llama.expert_count": 0}
    file = GGUFFile(to_gguf(random_llama(tmp_path / "hf"), tmp_path / "whole.gguf", more=more))
    whole = file.metadata
    whole["tokenizer.ggml.tokens"][-1] = '!"'
    for what, metadata in [*damaged(whole), *damaged(whole | spm)]:
        if "ud800" in what:
            continue  # a file holds UTF-8
        try:
            read_hf_config(hf_config(metadata, file.tensors))
            read_tokenizer(metadata).backend.encode("abc")
        except ConfigError as error:
            assert re.search("'[a-z_.]+'", str(error)), what
