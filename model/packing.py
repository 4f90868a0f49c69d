"""Weight matrices <-> the panels that the kernels multiply by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenteller.model.config import Storage
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.kernels import DEPTH, GROUP, NIBBLES, PANEL, Panels

Matrix = torch.Tensor | BlockMatrix  # [out, in]

# What a matrix is kept in where it is not multiplied: int8 and int4 are for products only.
DTYPES: dict[Storage, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
    "int4": torch.float16,
}
_PIECE = 2**17  # numbers rounded at once, so that intermediate results stay in the cache


def as_tensor(matrix: Matrix) -> torch.Tensor:
    return torch.from_numpy(matrix.decode()) if isinstance(matrix, BlockMatrix) else matrix


def is_exact(matrix: Matrix, storage: Storage) -> bool:
    """Whether a matrix in a file's own blocks can be repacked as it is, without decoding and rounding."""
    return storage == "int4" and isinstance(matrix, BlockMatrix) and matrix.kind.nibbles is not None


def pack(parts: Sequence[Matrix], storage: Storage, bias: torch.Tensor | None = None) -> Panels:
    """Matrices [out, in] stacked on top of each other, and the bias [out] of all, as this machine multiplies them."""
    added = np.empty(0, np.float32) if bias is None else bias.float().numpy()
    if storage == "int8":
        return Panels(*_pack_in_pieces(parts, GROUP, _round_to_bytes), added)
    if storage == "int4":
        exact = all(is_exact(part, storage) for part in parts)
        return Panels(*_pack_in_pieces(parts, NIBBLES, _stored_nibbles if exact else _round_to_nibbles), added)
    outputs, inputs = sum(map(len_of, parts)), parts[0].shape[1]
    panels = -(-outputs // PANEL)
    filled = torch.zeros((panels * PANEL, inputs), dtype=DTYPES[storage])
    torch.cat([as_tensor(part).to(DTYPES[storage]) for part in parts], out=filled[:outputs])
    filled = filled.view(panels, PANEL, inputs).transpose(1, 2).contiguous()  # [P, in, PANEL]
    unscaled = np.empty((0, 0, 0), np.float32)
    if storage == "bf16":
        return Panels(filled.view(torch.int16).numpy(), unscaled, added)
    return Panels(filled.numpy().view(np.uint16) if storage == "fp16" else filled.numpy(), unscaled, added)


def len_of(matrix: Matrix) -> int:
    return matrix.shape[0]


Packed = tuple[NDArray[Any], NDArray[Any]]  # numbers and scales of some panels, as in Panels


def _pack_in_pieces(parts: Sequence[Matrix], group: int, pack_rows: Callable[[list[Matrix], int], Packed]) -> Packed:
    """All panels from pack_rows(rows, groups), called for a few panels at a time on all threads."""
    outputs, groups = sum(map(len_of, parts)), -(-parts[0].shape[1] // group)
    panels, step = -(-outputs // PANEL), max(1, _PIECE // (groups * group * PANEL))
    if panels <= step:
        numbers, scales = pack_rows(list(parts), groups)
        return np.ascontiguousarray(numbers), np.ascontiguousarray(scales)
    some = pack_rows(list(_rows(parts, 0, PANEL)), groups)  # for the shapes
    numbers, scales = (np.empty((panels, *array.shape[1:]), array.dtype) for array in some)

    def fill(at: int) -> None:
        rows = list(_rows(parts, at * PANEL, (at + step) * PANEL))
        numbers[at : at + step], scales[at : at + step] = pack_rows(rows, groups)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, panels, step)))
    return numbers, scales


def _rows(parts: Sequence[Matrix], first: int, last: int) -> Iterator[Matrix]:
    """Rows `first` to `last` of the stacked parts."""
    at = 0
    for part in parts:
        begin, end = max(first - at, 0), min(last - at, len_of(part))
        if begin < end:
            yield part[begin:end]
        at += len_of(part)


def _in_groups(rows: list[Matrix], groups: int, size: int) -> NDArray[np.float32]:
    """Rows [out, in] as [out, groups, size], padded with zeros to whole panels and groups."""
    outputs, inputs = sum(map(len_of, rows)), rows[0].shape[1]
    filled = np.zeros((-(-outputs // PANEL) * PANEL, groups, size), np.float32)
    flat, at = filled.reshape(len(filled), -1), 0
    for part in rows:
        numbers = part.decode() if isinstance(part, BlockMatrix) else part.float().numpy()
        flat[at : at + len(numbers), :inputs] = numbers
        at += len(numbers)
    return filled


def _by_panel(rows: NDArray[Any]) -> NDArray[Any]:
    """[out, n] -> [P, n, PANEL]"""
    return rows.reshape(-1, PANEL, rows.shape[1]).transpose(0, 2, 1)


def _round_to_bytes(rows: list[Matrix], groups: int) -> Packed:
    """int8: each number is -127..127 times the scale of its group."""
    numbers = _in_groups(rows, groups, GROUP)
    scales = np.abs(np.maximum(numbers.max(axis=2), -numbers.min(axis=2))) / np.float32(127.0)  # [out, G]
    numbers /= np.where(scales > 0, scales, 1)[:, :, None]
    whole = np.rint(numbers, out=numbers).astype(np.int8).reshape(len(numbers), -1)
    if DEPTH == 4:
        whole = whole.view(np.uint8) ^ 128  # unsigned, offset by 128
    inputs = _by_panel(whole.view(f"u{DEPTH}"))  # DEPTH inputs of one output lie side by side
    return np.ascontiguousarray(inputs).view(whole.dtype).reshape(*inputs.shape, DEPTH), _by_panel(scales)


def _round_to_nibbles(rows: list[Matrix], groups: int) -> Packed:
    """int4: each number is one of 16 equal steps from the lowest to the highest of its group."""
    whole = _in_groups(rows, groups, NIBBLES)
    lowest = whole.min(axis=2).astype(np.float16)  # [out, G]
    step = ((whole.max(axis=2) - lowest) / 15).astype(np.float16)
    whole -= lowest[:, :, None]
    whole /= np.where(step > 0, step, 1)[:, :, None]
    numbers = np.rint(whole, out=whole).clip(0, 15, out=whole).astype(np.uint8)
    words = numbers.reshape(len(numbers), -1).view(np.uint32).reshape(len(numbers), -1, 2)  # 4 numbers a word
    return _nibble_panels(words[:, :, 0] | words[:, :, 1] << np.uint32(4), step, lowest)


def _stored_nibbles(rows: list[Matrix], groups: int) -> Packed:
    """int4 from blocks of a file that hold the same numbers: only their order changes."""
    stored = [part.kind.nibbles(part.blocks) for part in rows if isinstance(part, BlockMatrix) and part.kind.nibbles]
    nibbles, step, lowest = (np.concatenate(arrays) for arrays in zip(*stored, strict=True))
    missing = -len(nibbles) % PANEL
    if missing:
        nibbles, step, lowest = (
            np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
            for array in (nibbles, step, lowest)
        )
    # inputs 0 to 15 of a block are in the lower halves of its 16 bytes, 16 to 31 in the upper ones
    words = np.ascontiguousarray(nibbles).view(np.uint32)  # [out, G, 4]
    mask, four = np.uint32(0x0F0F0F0F), np.uint32(4)
    lower, upper = words & mask, words >> four & mask
    halves = np.concatenate([lower, upper], axis=2).reshape(len(words), -1, 2)  # [out, G * 4, 2], 4 inputs a word
    return _nibble_panels(halves[:, :, 0] | halves[:, :, 1] << four, step, lowest)


def _nibble_panels(words: NDArray[np.uint32], step: NDArray[np.float16], lowest: NDArray[np.float16]) -> Packed:
    """words: [out, in / 8], 8 inputs each. A byte holds two inputs that are 4 apart."""
    numbers = np.ascontiguousarray(_by_panel(words)).view(np.uint8)  # [P, in / 8, PANEL * 4]
    scales = np.stack((_by_panel(step), _by_panel(lowest)), axis=2)  # [P, G, 2, PANEL]
    return numbers.reshape(*numbers.shape[:2], PANEL, 4), scales.view(np.uint16)


def unpack(panels: Panels, ids: NDArray[np.int64], width: int) -> NDArray[np.float32]:
    """weight[ids] in fp32, [N, width]."""
    at, column = ids // PANEL, ids % PANEL
    if not panels.scales.size:
        numbers = panels.numbers[at, :, column]  # [N, in]
        if numbers.dtype == np.int16:  # bf16: the upper half of an fp32 number
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
