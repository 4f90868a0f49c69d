"""Types of GGUF tensors, and matrices kept in a file's own quantised blocks until they are packed.

To add a type, enter it in TYPES. One without a decoder here is decoded by the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenteller.model.config import Storage
from tokenteller.model.formats.errors import ConfigError

Bytes = NDArray[np.uint8]
# [rows, blocks, block bytes] -> nibbles [rows, blocks, 16], steps and minima in fp16 [rows, blocks]
Nibbles = Callable[[Bytes], tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]]
Decode = Callable[[Bytes], NDArray[np.float32]]  # -> numbers [rows, blocks, numbers of a block]


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one type stores `numbers` numbers in `size` bytes, and the weight format that comes nearest to it."""

    name: str
    numbers: int
    size: int
    nearest: Storage
    exact: bool = False  # the nearest format loses nothing
    decode: Decode | None = None
    nibbles: Nibbles | None = None  # reads blocks that int4 can hold exactly: step * nibble + minimum


def _fp16(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The fp16 number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _q4_0_nibbles(blocks: Bytes) -> tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]:
    """step * (nibble - 8); times 8 is exact in fp16."""
    step = _fp16(blocks, 0)
    return blocks[..., 2:], step, step * np.float16(-8)


def _q4_1_nibbles(blocks: Bytes) -> tuple[Bytes, NDArray[np.float16], NDArray[np.float16]]:
    return blocks[..., 4:], _fp16(blocks, 0), _fp16(blocks, 2)


def _q8_0(blocks: Bytes) -> NDArray[np.float32]:
    return _fp16(blocks, 0).astype(np.float32)[..., None] * blocks[..., 2:].view(np.int8)


# by the number that stands for them in a file
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, "fp32", exact=True),
    1: BlockType("F16", 1, 2, "fp16", exact=True),
    2: BlockType("Q4_0", 32, 18, "int4", exact=True, nibbles=_q4_0_nibbles),
    3: BlockType("Q4_1", 32, 20, "int4", exact=True, nibbles=_q4_1_nibbles),
    6: BlockType("Q5_0", 32, 22, "int8"),
    7: BlockType("Q5_1", 32, 24, "int8"),
    8: BlockType("Q8_0", 32, 34, "int8", decode=_q8_0),
    9: BlockType("Q8_1", 32, 40, "int8"),
    10: BlockType("Q2_K", 256, 84, "int4"),
    11: BlockType("Q3_K", 256, 110, "int4"),
    12: BlockType("Q4_K", 256, 144, "int4"),
    13: BlockType("Q5_K", 256, 176, "int8"),
    14: BlockType("Q6_K", 256, 210, "int8"),
    15: BlockType("Q8_K", 256, 292, "int8"),
    16: BlockType("IQ2_XXS", 256, 66, "int4"),
    17: BlockType("IQ2_XS", 256, 74, "int4"),
    18: BlockType("IQ3_XXS", 256, 98, "int4"),
    19: BlockType("IQ1_S", 256, 50, "int4"),
    20: BlockType("IQ4_NL", 32, 18, "int4"),
    21: BlockType("IQ3_S", 256, 110, "int4"),
    22: BlockType("IQ2_S", 256, 82, "int4"),
    23: BlockType("IQ4_XS", 256, 136, "int4"),
    28: BlockType("F64", 1, 8, "fp32"),
    29: BlockType("IQ1_M", 256, 56, "int4"),
    30: BlockType("BF16", 1, 2, "bf16", exact=True),
    34: BlockType("TQ1_0", 256, 54, "int4"),
    35: BlockType("TQ2_0", 256, 66, "int4"),
    39: BlockType("MXFP4", 32, 17, "int4"),
    40: BlockType("NVFP4", 64, 36, "int4"),
    41: BlockType("Q1_0", 128, 18, "int4"),
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [out, in] as a file stores it."""

    kind: BlockType
    bytes: Bytes  # [out, bytes of a row]

    @property
    def shape(self) -> tuple[int, int]:
        rows, size = self.bytes.shape
        return rows, size // self.kind.size * self.kind.numbers

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> BlockMatrix:
        return BlockMatrix(self.kind, self.bytes[rows])

    @property
    def blocks(self) -> Bytes:
        """[out, blocks, bytes of a block]"""
        return self.bytes.reshape(len(self.bytes), -1, self.kind.size)

    def decode(self) -> NDArray[np.float32]:
        """Its numbers [out, in]. Raises ConfigError for a type that nothing here can decode."""
        if self.kind.decode:
            return self.kind.decode(self.blocks).reshape(self.shape)
        from gguf.constants import GGMLQuantizationType  # slow to import, and not needed for every type
        from gguf.quants import dequantize

        try:
            numbers: NDArray[Any] = dequantize(self.bytes, GGMLQuantizationType[self.kind.name])
        except NotImplementedError as error:
            raise ConfigError(f"is stored as {self.kind.name}, which cannot be decoded") from error
        return numbers
