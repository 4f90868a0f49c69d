"""How a weight matrix is stored and multiplied.

On the CPU the products are those of `kernels.py`, where a row's bits depend on no other row. On a GPU a library picks
its kernel by the number of rows, so steps are padded to sizes that a self-test found safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tokenteller.model.config import Storage
from tokenteller.model.kernels import DEPTH, GROUP, NIBBLES, PANEL, Panels, multiply

# what a matrix is kept in outside of products: int8 and int4 are forms of products only
DTYPES: dict[Storage, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
    "int4": torch.float16,
}


class StorageError(ValueError):
    """A device or a storage that this machine does not have."""


_PIECE = 64 * PANEL  # rows of a weight that are rounded to integers at once

# Row counts tried by the self-test; anything between two of them is padded up.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 30, 32, 36, 40, 48, 64, 72, 96, 128, 160, 192, 256)


class Linear:
    """y [N, out] = x [N, in] @ weight.T + bias; x and y in fp32 whatever the storage.

    On a GPU x is rounded to the storage first.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        storage: Storage = "fp32",
        bias: torch.Tensor | None = None,
        device: str = "cpu",
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])  # [out, in]
        self.device = device
        self.panels: Panels | None = None
        if device == "cpu":
            self.panels = pack(weight, storage, bias)
        else:
            self._bias = None if bias is None else bias.to(device, torch.float32)
            self._weight = weight.to(device, DTYPES[storage]).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.panels is None:
            y = F.linear(x.to(self._weight.dtype), self._weight).float()
            return y if self._bias is None else y + self._bias
        y = x.new_empty(x.shape[0], self.shape[0])
        multiply(x.numpy(), self.panels, y.numpy(), False)
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """weight[ids] in fp32, [N, in]: an embedding that is tied to the head needs no memory of its own."""
        if self.panels is None:
            return self._weight[ids].float()
        return torch.from_numpy(unpack(self.panels, ids.numpy(), self.shape[1]))


def pack(weight: torch.Tensor, storage: Storage, bias: torch.Tensor | None = None) -> Panels:
    """A weight [out, in] and bias [out] as they are multiplied on this machine."""
    added = np.empty(0, np.float32) if bias is None else bias.float().numpy()
    if storage in ("int8", "int4"):
        rounded = _bytes if storage == "int8" else _nibbles
        # some rows at a time, for they are in fp32 meanwhile
        pieces = [rounded(weight[at : at + _PIECE]) for at in range(0, weight.shape[0], _PIECE)]
        numbers, scales = map(np.concatenate, zip(*pieces, strict=True))
        return Panels(numbers, scales, added)
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    filled = weight.new_zeros((panels * PANEL, inputs), dtype=DTYPES[storage])
    filled[:outputs] = weight
    filled = filled.view(panels, PANEL, inputs).transpose(1, 2).contiguous()  # [P, in, PANEL]
    unscaled = np.empty((0, 0, 0), np.float32)
    if storage == "bf16":
        return Panels(filled.view(torch.int16).numpy(), unscaled, added)
    return Panels(filled.numpy().view(np.uint16) if storage == "fp16" else filled.numpy(), unscaled, added)


def _in_groups(weight: torch.Tensor, size: int) -> NDArray[np.float32]:
    """A weight [out, in] as [out, G, size], filled up with zeros to whole panels and groups."""
    outputs, inputs = weight.shape
    panels, groups = -(-outputs // PANEL), -(-inputs // size)
    filled = np.zeros((panels * PANEL, groups, size), np.float32)
    filled.reshape(panels * PANEL, -1)[:outputs, :inputs] = weight.float().numpy()
    return filled


def _bytes(weight: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers and scales of int8: -127..127 times the scale of each GROUP inputs."""
    numbers = _in_groups(weight, GROUP)
    groups = numbers.shape[1]
    scales = np.abs(numbers).max(axis=2) / np.float32(127.0)  # [out, G]
    numbers /= np.where(scales > 0, scales, 1)[:, :, None]
    np.rint(numbers, out=numbers)
    if DEPTH == 4:
        numbers += 128
    whole = numbers.astype(np.uint8 if DEPTH == 4 else np.int8)
    whole = whole.reshape(-1, PANEL, groups * GROUP // DEPTH, DEPTH).transpose(0, 2, 1, 3)
    by_panel = scales.reshape(-1, PANEL, groups).transpose(0, 2, 1)  # [P, G, PANEL]
    return np.ascontiguousarray(whole), np.ascontiguousarray(by_panel)


def _nibbles(weight: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers and scales of int4: each NIBBLES inputs' lowest and 15 steps above it; two a byte, 4 inputs apart."""
    whole = _in_groups(weight, NIBBLES)
    groups = whole.shape[1]
    lowest = whole.min(axis=2).astype(np.float16)  # [out, G]
    step = ((whole.max(axis=2) - lowest) / 15).astype(np.float16)
    whole -= lowest[:, :, None]
    whole /= np.where(step > 0, step, 1)[:, :, None]
    numbers = np.rint(whole).clip(0, 15).astype(np.uint8).reshape(-1, PANEL, groups * NIBBLES // 8, 2, 4)
    bytes_ = (numbers[:, :, :, 0] | numbers[:, :, :, 1] << 4).transpose(0, 2, 1, 3)  # [P, in / 8, PANEL, 4]
    scales = np.stack((step, lowest), axis=1).reshape(-1, PANEL, 2, groups).transpose(0, 3, 2, 1)  # [P, G, 2, PANEL]
    return np.ascontiguousarray(bytes_), np.ascontiguousarray(scales).view(np.uint16)


def unpack(panels: Panels, ids: NDArray[np.int64], width: int) -> NDArray[np.float32]:
    """weight[ids] in fp32, [N, width]."""
    at, column = ids // PANEL, ids % PANEL
    if not panels.scales.size:
        numbers = panels.numbers[at, :, column]  # [N, in]
        if numbers.dtype == np.int16:
            return (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return numbers.view(np.float16).astype(np.float32) if numbers.dtype == np.uint16 else numbers
    if panels.scales.dtype == np.uint16:
        bytes_ = panels.numbers[at, :, column]  # [N, in / 8, 4]
        whole = np.stack((bytes_ & 15, bytes_ >> 4), axis=2).reshape(len(ids), -1, NIBBLES).astype(np.float32)
        step, lowest = np.moveaxis(panels.scales[at, :, :, column].view(np.float16).astype(np.float32), 2, 0)  # [N, G]
        return (whole * step[:, :, None] + lowest[:, :, None]).reshape(len(ids), -1)[:, :width]
    numbers = panels.numbers[at, :, column].reshape(len(ids), -1).astype(np.float32)  # [N, G * GROUP]
    if DEPTH == 4:
        numbers -= 128
    return (numbers * panels.scales[at, :, column].repeat(GROUP, axis=1))[:, :width]


def check_storage(storage: Storage, device: str) -> None:
    """Raises StorageError for a device that is not there, or has no products in that form."""
    if device == "cuda" and not torch.cuda.is_available():
        built = "finds no such device" if torch.version.cuda else "is built without it"
        raise StorageError(f"--device cuda: this torch ({torch.__version__}) {built}")
    if storage in ("int8", "int4") and device != "cpu":
        raise StorageError(f"--weights {storage}: only on the CPU, not on {device}; use --weights fp16")


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
        x = torch.randn(largest, linear.shape[1], generator=torch.Generator().manual_seed(1)).to(linear.device)
        reference = linear(x)
        sizes = [rows for rows in sizes if _same_bits(linear, x, reference, rows)]
    return (*sizes, largest)


def _same_bits(linear: Linear, x: torch.Tensor, reference: torch.Tensor, rows: int) -> bool:
    """Whether the first and the last `rows` rows of x [M, in], multiplied alone, equal those of reference [M, out]."""
    front = torch.equal(linear(x[:rows].contiguous()), reference[:rows])
    return front and torch.equal(linear(x[-rows:].contiguous()), reference[-rows:])


def padded(rows: int, safe: tuple[int, ...]) -> int:
    """The smallest safe row count that holds `rows`; a multiple of the largest beyond it. None given: all are safe."""
    if not safe:
        return rows
    for size in safe:
        if size >= rows:
            return size
    largest = safe[-1]
    return -(-rows // largest) * largest
