"""Products with weights in int8 or int4: activations are rounded to 8 bits, in groups of inputs with a scale each.

Sums within a group are integers, exact in any order; the groups are one chain of fused multiply-adds in their order.
int8 rounds in groups of GROUP inputs, as Q8_0 of llama.cpp does. int4 rounds weights to 16 steps between the lowest and
the highest of each NIBBLES inputs, as Q4_1 does, and loses nothing of a file in that form.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

import tokenteller.model.kernels.emit as emit
from tokenteller.model.kernels.dots import group_of_bytes, group_of_nibbles
from tokenteller.model.kernels.emit import COLUMNS, F32, FLOATS, I32, I64, ZEROS
from tokenteller.model.kernels.floats import put
from tokenteller.model.kernels.ladder import ladder
from tokenteller.model.kernels.launch import kernel
from tokenteller.model.kernels.target import DEPTH, EXACT, GROUP, LANES, NIBBLES, PANEL, TILE_INTEGERS

_ROUND = np.float32(12582912.0)  # 1.5 x 2^23: adding and subtracting it rounds to the nearest integer
_ABS = np.int32(0x7FFFFFFF)
VALUE = {4: np.int8, 2: np.int16, 1: np.int32}[DEPTH]  # what an activation is rounded to for int8 weights
INT8_SHIFT = -128 if DEPTH == 4 else 0  # int8 weights are shifted by 128 to be unsigned where values are bytes


@njit(**EXACT, inline="always")
def _quantise_row(x, values, scales, starts, size, shift, block):  # type: ignore[no-untyped-def]
    bits = block.view(np.int32)
    for group in range(len(scales)):
        first = group * size
        count = min(size, len(x) - first)
        for n in range(count):
            block[n] = x[first + n]
        for n in range(count, size):
            block[n] = np.float32(0.0)
        most = np.int32(0)
        for n in range(size):
            most = max(most, bits[n] & _ABS)  # the bits of floats without sign sort like the floats
        largest = np.int32(most).view(np.float32)
        inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
        total = np.int32(0)
        for n in range(size):
            value = np.int32((block[n] * inverse + _ROUND) - _ROUND)
            values[first + n] = value
            total += value
        scales[group] = largest / np.float32(127.0)
        starts[group] = np.int32(shift) * total


@kernel(**EXACT)
def quantise_rows(begin, stop, x, values, scales, starts, size, shift):  # type: ignore[no-untyped-def]
    """x [N, in] -> values [N, G * size] in -127..127, scales [N, G], starts [N, G]: `shift` x the sum of the values.

    A group with NaN or infinity has a scale that is not finite either.
    """
    block = np.empty(size, np.float32)
    for n in range(begin, stop):
        _quantise_row(x[n], values[n], scales[n], starts[n], size, shift, block)


def _add_group(builder, nibbles, scales, factors, begins, sums, totals):  # type: ignore[no-untyped-def]
    """totals + one group's integer sums x the weights' scales (base, index) x each row's factor, by row and column.

    int4 adds the lowest of its weights times the sum of the row's values.
    """
    base, at = scales
    number = types.uint16 if nibbles else types.float32
    steps = [emit.widened(builder, number, base, builder.add(at, I64(column))) for column in COLUMNS]
    lowest = []
    if nibbles:
        lowest = [emit.widened(builder, number, base, builder.add(at, I64(PANEL + column))) for column in COLUMNS]
    longer = []
    for factor, begin in zip(factors, begins, strict=True):
        scale = emit.splat(builder, factor)
        if nibbles:
            whole = emit.splat(builder, builder.fmul(builder.sitofp(begin, F32), factor))
        for column, step in enumerate(steps):
            total = next(totals)
            if nibbles:
                total = emit.fma(builder, whole, lowest[column], total)
            product = builder.sitofp(next(sums), FLOATS)
            longer.append(emit.fma(builder, product, builder.fmul(scale, step), total))
    return longer


@intrinsic(prefer_literal=True)
def _tile(typing, rows, args):  # type: ignore[no-untyped-def]
    """sums [rows, PANEL] = the groups' integer sums x their two scales, one chain over the groups; rows: a literal.

    args: values, at, scales, starts, panels, panel, weight_scales, sums, ahead; of the rows from `at` on.
    values [N, in] 8-, 16- or 32-bit for a depth of 4, 2 or 1; scales and starts [N, G].
    int8: panels [P, in / depth, PANEL, depth] bytes, weight_scales [P, G, PANEL]; a group's sum begins at its start.
    int4: panels [P, in / 8, PANEL, 4] bytes, weight_scales [P, G, 2, PANEL] bits of fp16, step and lowest; a group's
    start is the sum of its values, which the lowest is multiplied by.
    The panel's bytes `ahead` are prefetched, unless that is 0.
    """
    values, _, scales, starts, panels, _, weight_scales, sums, _ = args
    nibbles = weight_scales.dtype == types.uint16
    depth, size = 32 // values.dtype.bitwidth, NIBBLES if nibbles else GROUP
    group_bytes = PANEL * (size // 2 if nibbles else size)
    group_scales = 2 * PANEL if nibbles else PANEL

    def build(context, builder, signature, packed):  # type: ignore[no-untyped-def]
        x, at, x_scales, x_starts, weights, panel, w_scales, out, ahead = cgutils.unpack_tuple(builder, packed[1])
        groups = builder.extract_value(context.make_array(scales)(context, builder, x_scales).shape, 1)
        first = builder.mul(panel, groups)  # group of the panel
        base = builder.gep(emit.data(context, builder, panels, weights), [builder.mul(first, I64(group_bytes))])
        ours = emit.data(context, builder, weight_scales, w_scales)
        ours = builder.gep(ours, [builder.mul(first, I64(group_scales))])
        words = builder.bitcast(emit.data(context, builder, values, x), I32.as_pointer())
        first_scale = emit.data(context, builder, scales, x_scales)
        first_start = emit.data(context, builder, starts, x_starts)
        count = rows.literal_value
        loop = emit.Loop(builder, groups, [ZEROS] * (count * len(COLUMNS)))
        # of each row's group in scales and starts
        places = [builder.add(builder.mul(builder.add(at, I64(row)), groups), loop.at) for row in range(count)]
        lines = [builder.gep(words, [builder.mul(place, I64(size // depth))]) for place in places]
        begins = [builder.load(builder.gep(first_start, [place])) for place in places]
        group = builder.gep(base, [builder.mul(loop.at, I64(group_bytes))])
        with builder.if_then(builder.icmp_signed("!=", ahead, I64(0))):
            for line in range(0, group_bytes, 64):
                emit.prefetch(builder, group, builder.add(ahead, I64(line)))
        if nibbles:
            found = iter(group_of_nibbles(builder, group, lines))
        else:
            starting = [emit.splat(builder, begin) for begin in begins]
            found = iter(group_of_bytes(builder, depth, group, lines, starting))
        where = builder.mul(loop.at, I64(group_scales))
        factors = [builder.load(builder.gep(first_scale, [place])) for place in places]
        longer = _add_group(builder, nibbles, (ours, where), factors, begins, found, iter(loop.carried))
        loop.end(longer)
        for n, total in enumerate(longer):
            emit.store(builder, total, emit.data(context, builder, sums, out), I64(n * LANES))
        return context.get_dummy_value()

    return types.void(rows, args), build


_tiles = ladder(_tile, TILE_INTEGERS)


@kernel(**EXACT)
def multiply_integers(begin, stop, values, scales, starts, panels, weight_scales, bias, out, add):  # type: ignore[no-untyped-def]
    """Panels begin..stop-1 of what `quantise_rows` made of x, times int8 or int4 panels, both as `_tile` wants them."""
    rows, size = len(values), panels[0].size
    sums = np.empty((TILE_INTEGERS, PANEL), np.float32)
    for panel in range(begin, stop):
        at = 0
        while at < rows:
            ahead = 0 if at else size
            count = _tiles(rows - at, (values, at, scales, starts, panels, panel, weight_scales, sums, ahead))
            put(sums, at, count, panel, bias, out, add)
            at += count
