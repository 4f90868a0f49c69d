"""GGUF files: twins of safetensors checkpoints are the same model, tokenizers give the same ids, damage is named."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, config_of, damaged, random_hf, random_llama, to_gguf
from gguf import GGMLQuantizationType as Kind
from test_parity import CASES, SHAPES, TOKENS, close, forward, twin_of
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.gguf import GGUFError, GGUFFile
from tokenteller.model.formats.gguf_config import hf_config
from tokenteller.model.formats.gguf_tokenizer import read_tokenizer
from tokenteller.model.formats.hf_config import read_hf_config
from tokenteller.model.formats.stored import read_config
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

TWINS = [
    "llama 4/4",
    "llama 4/2",
    "llama 6/2",
    "llama head_dim 24",
    "llama biases",
    "llama tied",
    "llama linear",
    "llama yarn",
    "mistral",
    "qwen2",
    "qwen3 6/2 head_dim 24",
    "gpt2",
    "gpt2 gelu untied",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if "yarn" not in name and "llama3" not in name),
]


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    decoder = load(str(path), "fp32").decoder
    return forward(decoder, KVPool(KVLayout.of(decoder.config, 256), slots=1), (0, tokens, 0))


@pytest.mark.parametrize("case", TWINS)
def test_a_gguf_twin_is_the_same_model_bit_for_bit(tmp_path: Path, case: str) -> None:
    config = CASES[case] | ({"activation_function": "gelu_new"} if "gpt2" in case else {})
    directory = random_hf(tmp_path / "hf", config)
    twin = to_gguf(directory, tmp_path / "twin.gguf")
    assert torch.equal(logits(twin, TOKENS[:40]), logits(directory, TOKENS[:40]))
    ours, theirs = read_config(str(twin)), read_config(str(directory))
    assert ours.num_parameters == theirs.num_parameters and ours.windows == theirs.windows


def test_llama3_scaling_stands_in_the_tensor_rope_freqs(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    directory = random_hf(tmp_path / "hf", config_of("llama", rope_parameters=rope))
    path = to_gguf(directory, tmp_path / "plain.gguf")
    twin = with_tensor(path, tmp_path / "twin.gguf", "rope_freqs.weight", llama3_factors(rope, 16))
    close(logits(twin, TOKENS[:60]), twin_of(directory).expected(TOKENS[:60]))


def numbers(file: GGUFFile, name: str) -> np.ndarray[Any, Any]:
    stored = file.read(name)
    return stored.decode().reshape(file.tensors[name].shape) if isinstance(stored, BlockMatrix) else stored


def llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray[Any, Any]:
    """As the converter works them out: by how much each frequency is divided."""
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    factors = []
    for pair in range(dim // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * pair / dim)
        smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        middle = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < high else rope["factor"] if wave > low else middle)
    return np.array(factors, np.float32)


def with_tensor(path: Path, to: Path, name: str, array: np.ndarray[Any, Any]) -> Path:
    """A copy of a GGUF file with one tensor more, or another in its place."""
    reader, file = gguf.GGUFReader(path), GGUFFile(path)
    writer = gguf.GGUFWriter(to, file.metadata["general.architecture"])
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind, *element = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=element[-1] if element else None)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors} | {name: array}
    for key, data in tensors.items():
        writer.add_tensor(key, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_a_quantised_file_is_the_model_with_its_weights_rounded(tmp_path: Path, kind: Kind) -> None:
    """Exactly the weights that the library decodes are used, and they stay near the original's."""
    directory = random_llama(tmp_path / "hf")
    path = to_gguf(directory, tmp_path / "twin.gguf", kind)
    file, plain = GGUFFile(path), GGUFFile(to_gguf(directory, tmp_path / "plain.gguf"))
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (numbers(file, tensor.name) == expected).all() and numbers(file, tensor.name).shape == expected.shape
        worst = np.abs(expected - numbers(plain, tensor.name)).max() / np.abs(expected).max()
        assert worst < {Kind.Q4_0: 0.15, Kind.Q4_1: 0.1, Kind.Q5_0: 0.08, Kind.Q5_1: 0.05}.get(kind, 0.01)
    assert logits(path, TOKENS[:10]).isfinite().all()


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.quants._type_traits if kind.name[0] in "QITMN"], ids=lambda k: k.name
)
def test_every_block_type_of_the_library_is_read(tmp_path: Path, kind: Kind) -> None:
    """Random blocks: the library cannot write all types, but it reads them."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (4, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("blocks", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "blocks.gguf")
    assert file.tensors["blocks"].shape == (4, 2 * block)
    np.testing.assert_array_equal(numbers(file, "blocks"), gguf.quants.dequantize(raw, kind))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    at = tmp_path_factory.mktemp("gguf")
    return to_gguf(random_llama(at / "hf"), at / "whole.gguf").read_bytes()


def test_a_file_cut_anywhere_is_refused_in_one_line_that_names_it(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 20, 24, 60, 500, 3000, len(whole) // 2, len(whole) - 4096, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            load(str(path), "fp32")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_damaged_header_does_anything_but_raise_one_named_error(tmp_path: Path, whole: bytes) -> None:
    """Lengths and counts of 2^63, types that do not exist, names that are no UTF-8."""
    path, random = tmp_path / "damaged.gguf", np.random.default_rng(1)
    for at in random.integers(0, 12_000, 150):
        for damage in (b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 2**62)):
            path.write_bytes(whole[:at] + damage + whole[at + 8 :])
            try:
                load(str(path), "fp32")
            except CheckpointError as error:
                assert str(path) in str(error)


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    depth = 100_000
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "deep.gguf").write_bytes(head + struct.pack("<IQ", 9, 1) * depth)
    with pytest.raises(ConfigError, match=r"deep\.gguf: not a GGUF header, or cut short, at byte "):
        read_config(str(tmp_path / "deep.gguf"))


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.attn_factor": 2.0,
}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"llama.block_count": None}, "key 'llama.block_count' is missing"),
        ({"llama.expert_count": 8}, "key 'llama.expert_count' is 8"),
        ({"split.count": 3}, "key 'split.count' is 3; the file must be named NAME-00001-of-00003.gguf"),
        ({"llama.rope.dimension_count": 8}, "key 'llama.rope.dimension_count' is 8; supported: 16"),
        ({"llama.rope.scaling.type": "longrope"}, "is 'longrope'; supported"),
        ({"llama.attention.head_count_kv": [2, 1]}, "key 'llama.attention.head_count_kv' is [2, 1]; it must be"),
        ({"tokenizer.ggml.model": "bert"}, "key 'tokenizer.ggml.model' is 'bert'"),
        ({"tokenizer.ggml.pre": "wonder"}, "key 'tokenizer.ggml.pre' is 'wonder'"),
        ({"tokenizer.ggml.pre": None}, "key 'tokenizer.ggml.pre' is missing"),
        ({"tokenizer.ggml.eos_token_id": 999}, "key 'tokenizer.ggml.eos_token_id' is 999"),
        ({"split.count": "x"}, "key 'split.count' is 'x'; it must be an integer"),
        ({"general.alignment": 7}, "key 'general.alignment' is 7; it must be a multiple of 8"),
        ({"general.alignment": 512}, "bytes into the data; 'general.alignment' is 512"),
        (YARN | {"llama.rope.scaling.attn_factor": "x"}, "key 'llama.rope.scaling.attn_factor' is 'x'; it must be"),
        (YARN | {"llama.rope.scaling.factor": 0.0}, "RoPE 'factor' is 0.0"),
        ({"llama.context_length": 256.0}, "key 'llama.context_length' is 256.0; it must be an integer"),
        ({"llama.block_count": 2**31}, "key 'llama.block_count' is 2147483648; it must be at most 2,147,483,647"),
        ({"tokenizer.chat_template": 5}, "key 'tokenizer.chat_template' is 5; it must be a text"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "key 'tokenizer.ggml.eos_token_id' is 'x'; it must be an integer"),
        ({"tokenizer.ggml.merges": ["abc"]}, "key 'tokenizer.ggml.merges' is ['abc']; "),
        (
            {"tokenizer.ggml.merges": ["a b"]},
            "key 'tokenizer.ggml.merges' is ['a b']; Error while initializing BPE: Token `ab` out of vocabulary",
        ),
        ({"tokenizer.ggml.token_type": [1]}, "key 'tokenizer.ggml.token_type' has 1 types for 264 tokens"),
        ({"tokenizer.ggml.tokens": 5}, "key 'tokenizer.ggml.tokens' is 5; it must be a list"),
        ({"tokenizer.ggml.tokens": [1] * VOCAB}, "key 'tokenizer.ggml.tokens' has 1 at 0; it must be str"),
        ({"tokenizer.ggml.tokens": ["a"] * VOCAB}, "key 'tokenizer.ggml.tokens' has 'a' 264 times"),
        ({"tokenizer.ggml.tokens": None, "llama.vocab_size": VOCAB}, "key 'tokenizer.ggml.tokens' is missing"),
    ],
)
def test_metadata_that_is_missing_or_not_supported_is_named(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    path = to_gguf(random_llama(tmp_path / "hf"), tmp_path / "odd.gguf", more=more)
    with pytest.raises(CheckpointError) as caught:
        load(str(path), "fp32")
    assert named in str(caught.value) and str(path) in str(caught.value)


def test_whatever_stands_in_the_metadata_is_read_or_refused_in_one_line_that_names_a_key(
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


def test_tensors_that_are_odd_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    whole = to_gguf(random_llama(tmp_path / "hf"), tmp_path / "whole.gguf")
    extra = with_tensor(whole, tmp_path / "extra.gguf", "blk.0.wonder.weight", np.zeros((2, 2), np.float32))
    with pytest.raises(CheckpointError, match=r"extra\.gguf: tensor 'blk\.0\.wonder\.weight' is not used"):
        load(str(extra), "fp32")
    shape = with_tensor(whole, tmp_path / "shape.gguf", "blk.1.attn_q.weight", np.zeros((32, 64), np.float32))
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.attn_q\.weight' has shape \[32, 64\]"):
        load(str(shape), "fp32")
    two_layers = to_gguf(tmp_path / "hf", tmp_path / "missing.gguf", more={"llama.block_count": 3})
    with pytest.raises(CheckpointError, match=r"missing\.gguf: tensor 'blk\.2\.attn_q\.weight' is missing"):
        load(str(two_layers), "fp32")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"x\.gguf: key 'general\.architecture' is 'mamba'; supported: 'llama'"):
        read_config(str(tmp_path / "x.gguf"))


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


def test_each_pre_tokenizer_kind_cuts_otherwise() -> None:
    """Else a kind that is taken for another would not show in the test above."""
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
