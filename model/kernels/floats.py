"""Products with weights in fp32, fp16 or bf16: each output one chain of fused multiply-adds in the inputs' order."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

import tokenteller.model.kernels.emit as emit
from tokenteller.model.kernels.emit import COLUMNS, I64, ZEROS
from tokenteller.model.kernels.ladder import ladder
from tokenteller.model.kernels.launch import kernel
from tokenteller.model.kernels.target import EXACT, LANES, PANEL, TILE

_MANY = 16  # from so many rows on a panel of 16 bits is turned into fp32 first


@intrinsic(prefer_literal=True)
def _tile(typing, rows, args):  # type: ignore[no-untyped-def]
    """sums [rows, PANEL] = x [rows, length] . y [length, PANEL], each sum a chain; `rows` is a literal.

    args: x, x_at, x_stride, y, y_at, y_stride, length, sums. x begins at element x_at of an array in fp32 and its rows
    are x_stride apart; y is fp32, or the bits of fp16 in uint16 or of bf16 in int16.
    """
    x, _, _, y, _, _, _, sums = args

    def build(context, builder, signature, values):  # type: ignore[no-untyped-def]
        x_array, x_at, x_stride, y_array, y_at, y_stride, length, out = cgutils.unpack_tuple(builder, values[1])
        y_base = builder.gep(emit.data(context, builder, y, y_array), [y_at])
        x_base = builder.gep(emit.data(context, builder, x, x_array), [x_at])
        lines = [builder.gep(x_base, [builder.mul(x_stride, I64(row))]) for row in range(rows.literal_value)]
        loop = emit.Loop(builder, length, [ZEROS] * (len(lines) * len(COLUMNS)))
        place = builder.mul(loop.at, y_stride)
        weights = [emit.widened(builder, y.dtype, y_base, builder.add(place, I64(column))) for column in COLUMNS]
        totals = iter(loop.carried)
        longer = []
        for line in lines:
            value = emit.splat(builder, builder.load(builder.gep(line, [loop.at])))
            longer += [emit.fma(builder, value, weight, next(totals)) for weight in weights]
        loop.end(longer)
        for n, total in enumerate(longer):
            emit.store(builder, total, emit.data(context, builder, sums, out), I64(n * LANES))
        return context.get_dummy_value()

    return types.void(rows, args), build


tiles = ladder(_tile, TILE)


@intrinsic
def _widen(typing, panels, panel, wide):  # type: ignore[no-untyped-def]
    """wide [in * PANEL] = panels [panel] as fp32."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        shape = context.make_array(panels)(context, builder, args[0]).shape
        size = builder.mul(builder.extract_value(shape, 1), I64(PANEL))
        base = builder.gep(emit.data(context, builder, panels, args[0]), [builder.mul(args[1], size)])
        loop = emit.Loop(builder, builder.udiv(size, I64(LANES)), [])
        place = builder.mul(loop.at, I64(LANES))
        numbers = emit.widened(builder, panels.dtype, base, place)
        emit.store(builder, numbers, emit.data(context, builder, wide, args[2]), place)
        loop.end([])
        return context.get_dummy_value()

    return types.void(panels, panel, wide), build


@njit(**EXACT, inline="always")
def put(sums, at, count, panel, bias, out, add):  # type: ignore[no-untyped-def]
    """Finished sums of `count` rows from `at` on, with bias, into out, or added to what stands there."""
    first = panel * PANEL
    columns = min(PANEL, out.shape[1] - first)
    for row in range(count):
        if len(bias):
            for column in range(columns):
                sums[row, column] += bias[first + column]
        if add:
            for column in range(columns):
                out[at + row, first + column] += sums[row, column]
        else:
            for column in range(columns):
                out[at + row, first + column] = sums[row, column]


@kernel(**EXACT)
def multiply_floats(begin, stop, x, panels, bias, out, add):  # type: ignore[no-untyped-def]
    """Panels begin..stop-1 of out [N, out] = x [N, in] . panels + bias; panels [P, in, PANEL]."""
    rows, inputs = x.shape
    many = rows >= _MANY and panels.itemsize == 2
    sums = np.empty((TILE, PANEL), np.float32)
    wide = np.empty(inputs * PANEL if many else 0, np.float32)
    for panel in range(begin, stop):
        if many:
            _widen(panels, panel, wide)
        at = 0
        while at < rows:
            if many and rows - at >= TILE:
                _tile(TILE, (x, at * inputs, inputs, wide, 0, PANEL, inputs, sums))
                count = TILE
            else:
                count = tiles(rows - at, (x, at * inputs, inputs, panels, panel * inputs * PANEL, PANEL, inputs, sums))
            put(sums, at, count, panel, bias, out, add)
            at += count
