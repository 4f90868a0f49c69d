"""A weight as it lies in memory, and its product with activations, whatever its format.

The weight lies in panels of PANEL outputs: what a panel has for one input lies together and fills vector registers. The
innermost loop keeps the sums of some rows x PANEL outputs in registers and goes through the inputs once, in order: each
output is one chain of fused multiply-adds, however wide the registers are and whatever is computed beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenteller.model.kernels.floats import multiply_floats
from tokenteller.model.kernels.integers import INT8_SHIFT, VALUE, multiply_integers, quantise_rows
from tokenteller.model.kernels.launch import entry
from tokenteller.model.kernels.target import FEW, GROUP, NIBBLES

Floats = NDArray[np.float32]


class Panels(NamedTuple):
    """A weight [out, in] in panels, filled up with zeros to whole panels and, of integers, to whole groups."""

    numbers: NDArray[Any]  # [P, in, PANEL], of int8 [P, in / DEPTH, PANEL, DEPTH], of int4 [P, in / 8, PANEL, 4]
    scales: NDArray[Any]  # of int8: [P, G, PANEL]; of int4 bits of fp16 [P, G, 2, PANEL], step and lowest; else empty
    bias: Floats  # [out], or empty


@entry
def _multiply_floats(x, weight, out, add):  # type: ignore[no-untyped-def]
    numbers, _, bias = weight
    multiply_floats(len(numbers), True, (x, numbers, bias, out, add))


@entry
def _multiply_quantised(x, values, shift, weight, out, add):  # type: ignore[no-untyped-def]
    """values: room for x in integers, [N, G * inputs of a group]."""
    numbers, weight_scales, bias = weight
    rows, groups = len(x), weight_scales.shape[1]
    scales = np.empty((rows, groups), np.float32)
    starts = np.empty((rows, groups), np.int32)
    quantise_rows(rows, rows >= FEW, (x, values, scales, starts, values.shape[1] // groups, shift))
    multiply_integers(len(numbers), True, (values, scales, starts, numbers, weight_scales, bias, out, add))


@entry
def _multiply_int8(x, weight, out, add):  # type: ignore[no-untyped-def]
    values = np.empty((len(x), weight[1].shape[1] * GROUP), VALUE)
    _multiply_quantised(x, values, INT8_SHIFT, weight, out, add)


@entry
def _multiply_int4(x, weight, out, add):  # type: ignore[no-untyped-def]
    values = np.empty((len(x), weight[1].shape[1] * NIBBLES), np.int8)
    _multiply_quantised(x, values, 1, weight, out, add)


MULTIPLIERS = {"floats": _multiply_floats, "int8": _multiply_int8, "int4": _multiply_int4}


def weight_format(weight: Panels) -> str:
    """Which of MULTIPLIERS a weight needs, each a compiled (x, weight, out, add)."""
    if weight.scales.dtype == np.uint16:
        return "int4"
    return "int8" if weight.numbers.dtype in (np.uint8, np.int8) else "floats"


def multiply(x: Floats, weight: Panels, out: Floats, add: bool) -> None:
    """out [N, out] = x [N, in] @ weight.T + bias, or added to it."""
    MULTIPLIERS[weight_format(weight)](x, weight, out, add)


@entry
def quantise(x, values, scales, starts, size, shift):  # type: ignore[no-untyped-def]
    """`quantise_rows` for all rows of x."""
    quantise_rows(len(x), len(x) >= FEW, (x, values, scales, starts, size, shift))


@entry
def multiply_quantised(values, scales, starts, numbers, weight_scales, bias, out, add):  # type: ignore[no-untyped-def]
    """`multiply_integers` for all panels of a weight."""
    multiply_integers(len(numbers), True, (values, scales, starts, numbers, weight_scales, bias, out, add))
