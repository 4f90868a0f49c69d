"""Quantised blocks: their sizes, repacking without loss, split files, and what `--weights auto` makes of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import random_llama, to_gguf
from gguf import GGMLQuantizationType as Kind

from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.formats.blocks import NUMBERS, TYPES, BlockMatrix
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.stored import read_config, stored_format
from tokenteller.model.packing import pack, unpack

INTEGERS = {"I8", "I16", "I32", "I64"}  # no weights


def test_every_type_of_the_library_has_its_size_and_number() -> None:
    ours = {kind.name: (number, kind.numbers, kind.size) for number, kind in TYPES.items()}
    sizes = gguf.GGML_QUANT_SIZES
    assert ours == {kind.name: (int(kind), *sizes[kind]) for kind in sizes if kind.name not in INTEGERS}


def blocks(kind: Kind, rows: int, inputs: int = 96) -> BlockMatrix:
    """Random numbers as the library quantises them."""
    numbers = np.random.default_rng(rows).normal(size=(rows, inputs)).astype(np.float32)
    return BlockMatrix(TYPES[NUMBERS[kind.name]], gguf.quants.quantize(numbers, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("rows", [(96,), (70, 5, 33)])
def test_four_bit_blocks_become_int4_with_every_number_as_the_library_decodes_it(
    kind: Kind, rows: tuple[int, ...]
) -> None:
    parts = [blocks(kind, count) for count in rows]
    expected = np.concatenate([gguf.quants.dequantize(part.bytes, kind) for part in parts])
    got = unpack(pack(parts, "int4"), np.arange(sum(rows)), 96)
    np.testing.assert_array_equal(got, expected)


def test_blocks_of_mixed_types_are_rounded_like_their_numbers() -> None:
    parts = [blocks(Kind.Q4_1, 40), blocks(Kind.Q8_0, 40)]
    decoded = [torch.from_numpy(part.decode()) for part in parts]
    for ours, theirs in zip(pack(parts, "int4"), pack(decoded, "int4"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_pieces_and_threads_change_nothing(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    whole = pack([weight], storage)
    monkeypatch.setattr("tokenteller.model.packing._PIECE", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    for ours, theirs in zip(pack([weight[:90], weight[90:]], storage), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.F32, ("fp32", "as stored, F32", "fp32")),
        (Kind.F16, ("fp16", "as stored, F16", "fp16")),
        (Kind.BF16, ("bf16", "as stored, BF16", "fp16")),
        (Kind.Q4_0, ("int4", "as stored, Q4_0", "fp16")),
        (Kind.Q8_0, ("int8", "nearest to Q8_0", "fp16")),
        (Kind.Q5_1, ("int8", "nearest to Q5_1", "fp16")),
    ],
)
def test_auto_is_the_files_own_format_or_the_nearest(
    tmp_path: Path, kind: Kind, expected: tuple[str, str, str]
) -> None:
    path = to_gguf(random_llama(tmp_path / "hf"), tmp_path / "file.gguf", kind)
    assert stored_format(str(path)) == expected


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A file split in two, and beside it the whole file, whole.gguf."""
    whole = to_gguf(random_llama(tmp_path / "hf"), tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    paths = [tmp_path / f"split-0000{part}-of-00002.gguf" for part in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind, *element = field.types
                writer.add_key_value(field.name, field.contents(), kind, sub_type=element[-1] if element else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


class TestParts:
    def test_a_split_file_is_the_model_of_the_whole_one(self, parts: list[Path]) -> None:
        whole = parts[0].parent / "whole.gguf"
        assert read_config(str(parts[0])) == read_config(str(whole))
        ours, theirs = (load(str(path), "fp32").decoder.head.panels for path in (parts[0], whole))
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.numbers, theirs.numbers)

    def test_a_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(ConfigError, match=r"part split-00002-of-00002\.gguf is missing; split into 2"):
            read_config(str(parts[0]))

    def test_another_part_than_the_first_names_the_first(self, parts: list[Path]) -> None:
        with pytest.raises(CheckpointError, match=r"name the first part: split-00001-of-00002\.gguf"):
            load(str(parts[1]), "fp32")

    def test_a_damaged_part_is_named(self, parts: list[Path]) -> None:
        parts[1].write_bytes(b"GGUF")
        with pytest.raises(ConfigError, match=r"part split-00002-of-00002\.gguf: not a GGUF header"):
            read_config(str(parts[0]))
