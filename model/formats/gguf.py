"""GGUF files: metadata and tensors, in one file or in several. Torch-free.

The header is read here because `gguf.GGUFReader` takes seconds for the 98,000 strings of a small vocabulary.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenteller.model.formats.blocks import TYPES, BlockMatrix, BlockType
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.keys import Keys


class GGUFError(ConfigError):
    """Not a GGUF file, a truncated one, or one with something that is not supported."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file and how it is stored; `shape` as in PyTorch, rows first."""

    shape: tuple[int, ...]
    kind: BlockType
    start: int
    length: int


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GGUFFile:
    """One file, mapped into memory: `metadata` by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Raises GGUFError, or OSError where the file cannot be opened."""
        with open(path, "rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
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
        (text,) = self._strings(1)
        return text

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has 100,000 of them, so this loop is kept tight."""
        data, at, unpack, total = self._bytes, self._at, _LENGTH.unpack_from, len(self._bytes)
        texts = []
        for _ in range(count):
            self._at = at
            (length,) = unpack(data, at)
            end = at + 8 + length
            if end > total:
                raise GGUFError(f"cut short: a string of {length:,} bytes at byte {at + 8:,}")
            texts.append(data[at + 8 : end].decode())
            at = end
        self._at = at
        return texts

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
        if element == _STRING:
            return self._strings(count)
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

    def _located(self, name: str, data: int, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        kind = TYPES.get(number)
        if kind is None:
            raise GGUFError(f"tensor {name!r} has unknown type {number}")
        if shape[-1] % kind.numbers:
            raise GGUFError(
                f"tensor {name!r}: rows of {shape[-1]} do not divide into {kind.name} blocks of {kind.numbers}"
            )
        length = math.prod(shape) // kind.numbers * kind.size
        if data + offset + length > len(self._bytes):
            raise GGUFError(
                f"tensor {name!r} ends at byte {data + offset + length:,}, but the file has {len(self._bytes):,}"
            )
        return TensorInfo(shape, kind, data + offset, length)

    def read(self, name: str) -> NDArray[Any] | BlockMatrix:
        """A tensor as stored: F32 and F16 as an array over the file's pages, any other type in blocks."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.length, info.start)
        if info.kind.name in ("F32", "F16"):
            return raw.view(np.float32 if info.kind.name == "F32" else np.float16).reshape(info.shape)
        return BlockMatrix(info.kind, raw.reshape(math.prod(info.shape[:-1]), -1))

    def drop_pages(self) -> None:
        """Tells the system that no page read so far is needed in memory; a later read loads it again."""
        with suppress(AttributeError):  # not on Windows
            self._bytes.madvise(mmap.MADV_DONTNEED)


def open_parts(path: Path) -> list[GGUFFile]:
    """A file, or all parts of one split as NAME-00001-of-0000N.gguf, the one with the metadata first."""
    first = GGUFFile(path)
    keys = Keys(first.metadata)
    count = keys.integer("split.count", 1, least=0)
    if count <= 1:
        return [first]
    numbered = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not numbered or int(numbered[2]) != count:
        raise keys.wrong("split.count", f"the file must be named NAME-00001-of-{count:05}.gguf")
    if keys.integer("split.no", 0, least=0) != 0:
        raise keys.wrong("split.no", f"name the first part: {numbered[1]}-00001-of-{count:05}.gguf")
    names = [f"{numbered[1]}-{at:05}-of-{count:05}.gguf" for at in range(2, count + 1)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise GGUFError(f"part {missing[0]} is missing; split into {count}")
    return [first, *(_part(path.parent / name) for name in names)]


def _part(path: Path) -> GGUFFile:
    try:
        return GGUFFile(path)
    except GGUFError as error:
        raise GGUFError(f"part {path.name}: {error}") from error


class GGUFModel(Mapping[str, TensorInfo]):
    """The tensors of all parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = open_parts(path)
        self.metadata = self._parts[0].metadata
        self._where = {name: part for part in self._parts for name in part.tensors}
        if len(self._where) != sum(len(part.tensors) for part in self._parts):
            raise GGUFError("two parts have a tensor of the same name")

    def read(self, name: str) -> NDArray[Any] | BlockMatrix:
        return self._where[name].read(name)

    def drop_pages(self) -> None:
        for part in self._parts:
            part.drop_pages()

    def __getitem__(self, name: str) -> TensorInfo:
        return self._where[name].tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
