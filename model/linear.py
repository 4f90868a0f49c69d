"""How a weight matrix is stored and multiplied, and which row counts keep a row's bits apart from its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.nn.functional as F

Storage = Literal["fp32", "fp16"]

# Row counts tried by the self-test; anything between two of them is padded up.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 30, 32, 36, 40, 48, 64, 72, 96, 128, 160, 192, 256)


class Linear:
    """y [N, out] = x [N, in] @ weight.T, with activations in fp32.

    fp32: the weight as it is. fp16: packed for FBGEMM, half the memory and near the machine's arithmetic limit from
    16 rows up; a checkpoint that stores fp16 loses nothing.
    """

    def __init__(self, weight: torch.Tensor, storage: Storage = "fp32") -> None:
        self.shape = (weight.shape[0], weight.shape[1])  # [out, in]
        self.storage = storage
        if storage == "fp16":
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
            self._multiply: Callable[[torch.Tensor], torch.Tensor] = self._packed_fp16
        else:
            self._weight = weight.float().contiguous()
            self._multiply = self._full

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    def _full(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)

    def _packed_fp16(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


def find_safe_rows(linears: Iterable[Linear], max_rows: int) -> tuple[int, ...]:
    """Row counts at which every product gives each row the same bits, whatever its place and its neighbours.

    A library picks its kernel by the number of rows, and kernels differ in the last bit. So each shape is multiplied
    at every candidate size and compared with the same rows in one large product; a step is then padded to a size that
    passed. Ascending; the last one is the large product's own size, at least max_rows.
    """
    unique = {linear.shape: linear for linear in linears}
    largest = max(64, -(-max_rows // 32) * 32)
    sizes = [rows for rows in _CANDIDATES if rows < max_rows]
    for linear in unique.values():
        x = torch.randn(largest, linear.shape[1], generator=torch.Generator().manual_seed(1))
        reference = linear(x)
        sizes = [rows for rows in sizes if _same_bits(linear, x, reference, rows)]
    return (*sizes, largest)


def _same_bits(linear: Linear, x: torch.Tensor, reference: torch.Tensor, rows: int) -> bool:
    """Whether the first and the last `rows` rows of x [M, in], multiplied alone, equal those of reference [M, out]."""
    front = torch.equal(linear(x[:rows].contiguous()), reference[:rows])
    return front and torch.equal(linear(x[-rows:].contiguous()), reference[-rows:])


def padded(rows: int, safe: tuple[int, ...]) -> int:
    """The smallest safe row count that holds `rows`; a multiple of the largest beyond it."""
    for size in safe:
        if size >= rows:
            return size
    largest = safe[-1]
    return -(-rows // largest) * largest
