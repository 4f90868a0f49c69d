"""GGUF files: twins of safetensors checkpoints are the same model, tokenizers give the same ids, damage is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, config_of, random_hf, random_llama, to_gguf
from gguf import GGMLQuantizationType as Kind
from test_parity import CASES, SHAPES, TOKENS, close, forward, twin_of

from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.gguf import GGUFFile
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


def test_llama3_scaling_is_read_from_the_tensor_rope_freqs(tmp_path: Path) -> None:
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


def test_a_tensor_that_does_not_fit_is_named_as_the_file_names_it(tmp_path: Path) -> None:
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
