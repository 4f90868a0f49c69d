"""What the CPU computes, compiled by numba: matrix products, attention, norms, activations, and the whole step.

Each row is computed alone, so its bits depend on no other row, on no thread, and not on how many rows there are.

A product's weight lies in panels of PANEL outputs: what a panel has for one input lies together and fills vector
registers. The innermost loop keeps the sums of some rows x PANEL outputs in registers and goes through the inputs once,
in their order: each output is one chain of fused multiply-adds, however wide the registers are. A compiler does not
find that loop by itself, so it is written as LLVM code (`tile`, `_dots`).

fp32, fp16 and bf16 weights are used as they are. int8 rounds weights and activations to 8 bits, in groups of GROUP
inputs with a scale each (Q8_0 of llama.cpp does the same): sums within a group are integers, exact in any order, and
the groups are one chain again. int4 rounds weights to 16 steps between the lowest and the highest of each NIBBLES
inputs, as Q4_1 does, and loses nothing of a file in that form.

Compiled on first use and kept on disk beside this file, or under NUMBA_CACHE_DIR. All that is compiled is in this file,
since numba looks at no other to see whether what it kept is out of date.
"""

from __future__ import annotations

import math
import uuid
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import caching, cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from tokenteller.model.config import Activation

Floats = NDArray[np.float32]

# numba names the files of compiled code by number and writes the index first: of two processes that compile at the same
# time, or after a change, one can be given the other's code. A name of its own for each file leaves no such moment.
caching.IndexDataCacheFile._data_name = lambda self, number: self._data_name_pattern.format(number=uuid.uuid4().int)

# Starts numba's threads. Code that is read back from disk takes them for started and crashes if they are not.
numba.get_num_threads()


class Panels(NamedTuple):
    """A weight [out, in] in panels, filled up with zeros to whole panels and, of int8, to whole groups."""

    numbers: NDArray[Any]  # [P, in, PANEL], of int8 [P, in / DEPTH, PANEL, DEPTH], of int4 [P, in / 8, PANEL, 4]
    scales: NDArray[Any]  # of int8: [P, G, PANEL]; of int4 bits of fp16 [P, G, 2, PANEL], step and lowest; else empty
    bias: Floats  # [out], or empty


_FEATURES = llvm.get_host_cpu_features()
_WIDE = bool(_FEATURES.get("avx512f"))
LANES = 16 if _WIDE else 8  # fp32 numbers in a register
PANEL = 2 * LANES  # outputs that are computed together
GROUP = 64  # inputs that share a scale in int8,
NIBBLES = 32  # and in int4
# bytes that one instruction multiplies and adds up: 4 with VNNI, 2 (as 16 bits) with AVX2, else one by one
DEPTH = 4 if _FEATURES.get("avx512vnni") else 2 if _FEATURES.get("avx2") else 1

# rows of a tile: 32 or 16 registers hold the sums of no more; int8 has sums of a group beside those of all groups
TILE = 8 if _WIDE else 6
_TILE8 = 6 if _WIDE else 3
_BLOCK = 8  # neighbouring rows of one sequence that a thread attends to at once; fewer are not worth sharing out
_MANY = 16  # from so many rows on a panel of 16 bits is turned into fp32 first

_F32, _F16, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), *map(ir.IntType, (8, 16, 32, 64))
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_COLUMNS = range(0, PANEL, LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)

# Said at every function, also where it is False: one that says nothing takes over what the caller has that is compiled
# first. Where sums may be reordered for SIMD, they are the same way each time, and NaN and infinity keep their meaning.
# numpy's rules for errors, as a check for division by zero would keep a loop from becoming SIMD.
_EXACT: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True}
_FAST: dict[str, Any] = {**_EXACT, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}


def _data(context, builder, type_, array):  # type: ignore[no-untyped-def]
    """The address of an array's first element."""
    return context.make_array(type_)(context, builder, array).data


def _load(builder, base, index, vector):  # type: ignore[no-untyped-def]
    place = builder.bitcast(builder.gep(base, [index]), vector.as_pointer())
    return builder.load(place, align=1)


def _store(builder, value, base, index):  # type: ignore[no-untyped-def]
    builder.store(value, builder.bitcast(builder.gep(base, [index]), value.type.as_pointer()), align=1)


def _ask(builder, base, index):  # type: ignore[no-untyped-def]
    """Prefetches the cache line of an element: to read, into level 2."""
    place = builder.bitcast(builder.gep(base, [index]), _I8.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, _I32(0), _I32(2), _I32(1))


def _splat(builder, value):  # type: ignore[no-untyped-def]
    none = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(none, value, _I32(0))
    return builder.shuffle_vector(first, none, ir.Constant(_INTS, [0] * LANES))


def _call(builder, name, result, *args):  # type: ignore[no-untyped-def]
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _chain(builder, a, b, before):  # type: ignore[no-untyped-def]
    """before + a x b, rounded once."""
    return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, a, b, before)


def _widened(builder, dtype, base, index):  # type: ignore[no-untyped-def]
    """LANES weights of 32 or 16 bits as fp32."""
    if dtype == types.float32:
        return _load(builder, base, index, _FLOATS)
    if dtype == types.uint16:  # the bits of fp16
        base = builder.bitcast(base, _F16.as_pointer())
        return builder.fpext(_load(builder, base, index, ir.VectorType(_F16, LANES)), _FLOATS)
    high = builder.zext(_load(builder, base, index, ir.VectorType(_I16, LANES)), _INTS)  # the bits of bf16
    return builder.bitcast(builder.shl(high, ir.Constant(_INTS, [16] * LANES)), _FLOATS)


class _Loop:
    """for at in range(length), with values that are carried from round to round."""

    def __init__(self, builder, length, carried):  # type: ignore[no-untyped-def]
        self.builder, self.length, self.before = builder, length, builder.block
        self.body = builder.append_basic_block()
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.at = builder.phi(_I64)
        self.at.add_incoming(_I64(0), self.before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, self.before)

    def end(self, carried):  # type: ignore[no-untyped-def]
        """Closes the loop; the values after its last round are `carried`."""
        builder, last = self.builder, self.builder.block
        step = builder.add(self.at, _I64(1))
        self.at.add_incoming(step, last)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, last)
        after = builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("<", step, self.length), self.body, after)
        builder.position_at_end(after)


@intrinsic(prefer_literal=True)
def tile(typing, rows, x, x_at, x_stride, y, y_at, y_stride, length, sums):  # type: ignore[no-untyped-def]
    """sums [rows, PANEL] = x [rows, length] . y [length, PANEL], each sum a chain; `rows` is a literal.

    x begins at element x_at of an array in fp32 and its rows are x_stride apart; y is fp32, or the bits of fp16 in
    uint16 or of bf16 in int16.
    """

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _, x_array, x_at, x_stride, y_array, y_at, y_stride, length, out = args
        y_base = builder.gep(_data(context, builder, y, y_array), [y_at])
        x_base = builder.gep(_data(context, builder, x, x_array), [x_at])
        lines = [builder.gep(x_base, [builder.mul(x_stride, _I64(row))]) for row in range(rows.literal_value)]
        loop = _Loop(builder, length, [_ZERO] * (len(lines) * len(_COLUMNS)))
        place = builder.mul(loop.at, y_stride)
        weights = [_widened(builder, y.dtype, y_base, builder.add(place, _I64(column))) for column in _COLUMNS]
        chains = iter(loop.carried)
        longer = []
        for line in lines:
            value = _splat(builder, builder.load(builder.gep(line, [loop.at])))
            longer += [_chain(builder, value, weight, next(chains)) for weight in weights]
        loop.end(longer)
        for n, total in enumerate(longer):
            _store(builder, total, _data(context, builder, sums, out), _I64(n * LANES))
        return context.get_dummy_value()

    return types.void(rows, x, types.intp, types.intp, y, types.intp, types.intp, types.intp, sums), build


@intrinsic
def _widen(typing, panels, panel, wide):  # type: ignore[no-untyped-def]
    """wide [in * PANEL] = panels [panel] as fp32."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        shape = context.make_array(panels)(context, builder, args[0]).shape
        size = builder.mul(builder.extract_value(shape, 1), _I64(PANEL))
        base = builder.gep(_data(context, builder, panels, args[0]), [builder.mul(args[1], size)])
        loop = _Loop(builder, builder.udiv(size, _I64(LANES)), [])
        place = builder.mul(loop.at, _I64(LANES))
        _store(
            builder,
            _widened(builder, panels.dtype, base, place),
            _data(context, builder, wide, args[2]),
            place,
        )
        loop.end([])
        return context.get_dummy_value()

    return types.void(panels, panel, wide), build


@njit(**_EXACT)
def tiles(rows, x, x_at, x_stride, y, y_at, y_stride, length, sums):  # type: ignore[no-untyped-def]
    """Fills `sums` for as many of the `rows` that are left as make a tile; returns how many."""
    if rows >= TILE:
        tile(TILE, x, x_at, x_stride, y, y_at, y_stride, length, sums)
        return TILE
    if rows >= 4:
        tile(4, x, x_at, x_stride, y, y_at, y_stride, length, sums)
        return 4
    if rows >= 2:
        tile(2, x, x_at, x_stride, y, y_at, y_stride, length, sums)
        return 2
    tile(1, x, x_at, x_stride, y, y_at, y_stride, length, sums)
    return 1


@njit(**_EXACT)
def _put(sums, at, count, panel, bias, out, add):  # type: ignore[no-untyped-def]
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


@njit(**_EXACT, cache=True, parallel=True)
def _multiply_floats(x, panels, bias, out, add):  # type: ignore[no-untyped-def]
    """out [N, out] = x [N, in] . panels + bias; panels [P, in, PANEL] in fp32, or bits: fp16's uint16, bf16's int16."""
    rows, inputs = x.shape
    many = rows >= _MANY and panels.itemsize == 2
    for panel in prange(panels.shape[0]):
        sums = np.empty((TILE, PANEL), np.float32)
        wide = np.empty(inputs * PANEL if many else 0, np.float32)
        if many:
            _widen(panels, panel, wide)
        at = 0
        while at < rows:
            left, first = rows - at, at * inputs
            if many:
                count = tiles(left, x, first, inputs, wide, 0, PANEL, inputs, sums)
            else:
                count = tiles(left, x, first, inputs, panels, panel * inputs * PANEL, PANEL, inputs, sums)
            _put(sums, at, count, panel, bias, out, add)
            at += count


# int8


def _dot(builder, depth, weights, values, before):  # type: ignore[no-untyped-def]
    """before + weights . values for LANES outputs: `depth` bytes of each in one 32-bit place of the other operand."""
    if depth == 4:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, before, weights, values)
    if depth == 2:
        name = "llvm.x86.avx512.pmaddw.d.512" if _WIDE else "llvm.x86.avx2.pmadd.wd"
        pairs = ir.VectorType(_I16, 2 * LANES)
        return builder.add(before, _call(builder, name, _INTS, weights, builder.bitcast(values, pairs)))
    return builder.add(before, builder.mul(weights, values))


def _bytes(builder, depth, base, index):  # type: ignore[no-untyped-def]
    """`depth` weights of LANES outputs each, as _dot wants them: unsigned bytes, 16-bit pairs or 32-bit numbers."""
    if depth == 4:
        return _load(builder, base, index, _INTS)
    kind = ir.VectorType(_I16, 2 * LANES) if depth == 2 else _INTS
    return builder.sext(_load(builder, base, index, ir.VectorType(_I8, depth * LANES)), kind)


def _group_of_bytes(builder, depth, group, lines, begins):  # type: ignore[no-untyped-def]
    """Integer sums over one group of int8, by row and column; lines: each row's values, begins: what sums begin at."""
    loop = _Loop(builder, _I64(GROUP // depth), [begin for begin in begins for _ in _COLUMNS])
    place = builder.mul(loop.at, _I64(PANEL * depth))
    weights = [_bytes(builder, depth, group, builder.add(place, _I64(column * depth))) for column in _COLUMNS]
    chains = iter(loop.carried)
    sums = []
    for line in lines:
        value = _splat(builder, builder.load(builder.gep(line, [loop.at])))
        sums += [_dot(builder, depth, weight, value, next(chains)) for weight in weights]
    loop.end(sums)
    return sums


def _group_of_nibbles(builder, group, lines):  # type: ignore[no-untyped-def]
    """Integer sums over one group of int4, by row and column. A byte holds two weights of 0..15, 4 inputs apart.

    Products of a weight and an int8 value stay below 2^11, so that 16 of them fit in 16 bits: AVX2 adds them up there.
    """
    mask = ir.Constant(_INTS, [0x0F0F0F0F] * LANES)
    bytes_ = ir.VectorType(_I8, 4 * LANES)
    name = "llvm.x86.avx512.pmaddubs.w.512" if _WIDE else "llvm.x86.avx2.pmadd.ub.sw"
    kind = _INTS if DEPTH != 2 else ir.VectorType(_I16, 2 * LANES)
    sums = [ir.Constant(kind, None)] * (len(lines) * len(_COLUMNS))
    for pair in range(NIBBLES // 8):
        both = [_load(builder, group, _I64(4 * (pair * PANEL + column)), _INTS) for column in _COLUMNS]
        for half in (0, 1):
            shifted = [builder.lshr(part, ir.Constant(_INTS, [4] * LANES)) if half else part for part in both]
            weights = [builder.and_(part, mask) for part in shifted]
            chains, sums = iter(sums), []
            for line in lines:
                value = _splat(builder, builder.load(builder.gep(line, [_I64(2 * pair + half)])))
                for weight in weights:
                    if DEPTH == 4:
                        sums.append(_dot(builder, 4, weight, value, next(chains)))
                    elif DEPTH == 2:
                        operands = builder.bitcast(weight, bytes_), builder.bitcast(value, bytes_)
                        sums.append(builder.add(next(chains), _call(builder, name, kind, *operands)))
                    else:
                        sums.append(_dot_of_bytes(builder, weight, value, next(chains)))
    if DEPTH != 2:
        return sums
    ones, zero = ir.Constant(_INTS, [0x00010001] * LANES), ir.Constant(_INTS, [0] * LANES)
    return [_dot(builder, 2, total, ones, zero) for total in sums]


def _with_scales(builder, nibbles, scales, factors, begins, sums, totals):  # type: ignore[no-untyped-def]
    """totals + one group's integer sums x the weights' scales (base, index) x each row's factor, by row and column.

    int4 adds what its weights begin at, times the sum of the row's values.
    """
    base, at = scales
    number = types.uint16 if nibbles else types.float32
    steps = [_widened(builder, number, base, builder.add(at, _I64(column))) for column in _COLUMNS]
    lowest = []
    if nibbles:
        lowest = [_widened(builder, number, base, builder.add(at, _I64(PANEL + column))) for column in _COLUMNS]
    longer = []
    for factor, begin in zip(factors, begins, strict=True):
        scale = _splat(builder, factor)
        if nibbles:
            whole = _splat(builder, builder.fmul(builder.sitofp(begin, _F32), factor))
        for column, step in enumerate(steps):
            total = next(totals)
            if nibbles:
                total = _chain(builder, whole, lowest[column], total)
            longer.append(_chain(builder, builder.sitofp(next(sums), _FLOATS), builder.fmul(scale, step), total))
    return longer


def _dot_of_bytes(builder, weights, values, total):  # type: ignore[no-untyped-def]
    """total + weights . values over the 4 bytes of each place, one by one; values have a sign."""
    for byte in range(4):
        left, right = (ir.Constant(_INTS, [bits] * LANES) for bits in (24 - 8 * byte, 24))
        weight = builder.lshr(builder.shl(weights, left), right)
        total = builder.add(total, builder.mul(weight, builder.ashr(builder.shl(values, left), right)))
    return total


@intrinsic(prefer_literal=True)
def _dots(typing, rows, values, at, scales, starts, panels, panel, weight_scales, sums, ahead):  # type: ignore[no-untyped-def]
    """sums [rows, PANEL] = the groups' integer sums x their two scales, one chain over the groups; rows: a literal.

    values [N, in] 8-, 16- or 32-bit for a depth of 4, 2 or 1, scales and starts [N, G].
    int8: panels [P, in / depth, PANEL, depth] bytes, weight_scales [P, G, PANEL]; a group's sum begins at its start.
    int4: panels [P, in / 8, PANEL, 4] bytes, weight_scales [P, G, 2, PANEL] bits of fp16: what a weight's 0..15 is
    multiplied by and begins at; the start is the sum of the group's values, for the latter.
    The panel's bytes `ahead` are prefetched, if that is not 0.
    """
    nibbles = weight_scales.dtype == types.uint16
    depth, group_size = 32 // values.dtype.bitwidth, NIBBLES if nibbles else GROUP
    group_bytes = PANEL * (group_size // 2 if nibbles else group_size)
    group_scales = 2 * PANEL if nibbles else PANEL

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        groups = builder.extract_value(context.make_array(scales)(context, builder, args[3]).shape, 1)
        first = builder.mul(args[6], groups)  # group of the panel
        base = builder.gep(_data(context, builder, panels, args[5]), [builder.mul(first, _I64(group_bytes))])
        ours = builder.gep(_data(context, builder, weight_scales, args[7]), [builder.mul(first, _I64(group_scales))])
        words = builder.bitcast(_data(context, builder, values, args[1]), _I32.as_pointer())
        first_scale = _data(context, builder, scales, args[3])
        first_start = _data(context, builder, starts, args[4])
        count = rows.literal_value
        loop = _Loop(builder, groups, [_ZERO] * (count * len(_COLUMNS)))
        places = [
            builder.add(builder.mul(builder.add(args[2], _I64(row)), groups), loop.at) for row in range(count)
        ]  # of each row's group in scales and starts
        lines = [builder.gep(words, [builder.mul(place, _I64(group_size // depth))]) for place in places]
        begins = [builder.load(builder.gep(first_start, [place])) for place in places]
        group = builder.gep(base, [builder.mul(loop.at, _I64(group_bytes))])
        with builder.if_then(builder.icmp_signed("!=", args[9], _I64(0))):
            for line in range(0, group_bytes, 64):
                _ask(builder, group, builder.add(args[9], _I64(line)))
        if nibbles:
            sums_of_group = iter(_group_of_nibbles(builder, group, lines))
        else:
            starting = [_splat(builder, begin) for begin in begins]
            sums_of_group = iter(_group_of_bytes(builder, depth, group, lines, starting))
        at = builder.mul(loop.at, _I64(group_scales))
        factors = [builder.load(builder.gep(first_scale, [place])) for place in places]
        longer = _with_scales(builder, nibbles, (ours, at), factors, begins, sums_of_group, iter(loop.carried))
        loop.end(longer)
        out = _data(context, builder, sums, args[8])
        for n, total in enumerate(longer):
            _store(builder, total, out, _I64(n * LANES))
        return context.get_dummy_value()

    return types.void(rows, values, at, scales, starts, panels, panel, weight_scales, sums, types.intp), build


@njit(**_EXACT)
def _rows8(at, values, scales, starts, panels, panel, weight_scales, sums, ahead):  # type: ignore[no-untyped-def]
    left = values.shape[0] - at
    if left >= _TILE8:
        _dots(_TILE8, values, at, scales, starts, panels, panel, weight_scales, sums, ahead)
        return _TILE8
    if left >= 4:
        _dots(4, values, at, scales, starts, panels, panel, weight_scales, sums, ahead)
        return 4
    if left >= 2:
        _dots(2, values, at, scales, starts, panels, panel, weight_scales, sums, ahead)
        return 2
    _dots(1, values, at, scales, starts, panels, panel, weight_scales, sums, ahead)
    return 1


_VALUE = {4: np.int8, 2: np.int16, 1: np.int32}[DEPTH]
_ROUND = np.float32(12582912.0)  # 1.5 x 2^23: adding and taking it away rounds to the nearest integer
_ABS = np.int32(0x7FFFFFFF)


@njit(**_EXACT)
def _quantise(x, values, scales, starts, size, shift):  # type: ignore[no-untyped-def]
    block = np.zeros(size, np.float32)
    bits = block.view(np.int32)
    for group in range(len(scales)):
        first = group * size
        count = min(size, len(x) - first)
        block[count:] = np.float32(0.0)
        for n in range(count):
            block[n] = x[first + n]
        most = np.int32(0)
        for n in range(size):
            most = max(most, bits[n] & _ABS)
        largest = np.int32(most).view(np.float32)
        inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
        total = np.int32(0)
        for n in range(size):
            value = np.int32((block[n] * inverse + _ROUND) - _ROUND)
            values[first + n] = value
            total += value
        scales[group] = largest / np.float32(127.0)
        starts[group] = np.int32(shift) * total


@njit(**_EXACT, cache=True, parallel=True)
def quantise(x, values, scales, starts, size, shift):  # type: ignore[no-untyped-def]
    """x [N, in] -> values [N, G * size] in -127..127, scales [N, G], starts [N, G]: `shift` x the sum of the values.

    A group with NaN or infinity has a scale that is none either. (The bits of floats without sign sort like the
    floats.)
    """
    if len(x) < _BLOCK:
        for n in range(len(x)):
            _quantise(x[n], values[n], scales[n], starts[n], size, shift)
    else:
        for n in prange(len(x)):
            _quantise(x[n], values[n], scales[n], starts[n], size, shift)


@njit(**_EXACT, cache=True, parallel=True)
def multiply_quantised(values, scales, starts, panels, weight_scales, bias, out, add):  # type: ignore[no-untyped-def]
    """What `quantise` made of x, times int8 or int4 panels, both as `_dots` wants them."""
    rows, size = len(values), panels[0].size
    for panel in prange(panels.shape[0]):
        sums = np.empty((_TILE8, PANEL), np.float32)
        at = 0
        while at < rows:
            count = _rows8(at, values, scales, starts, panels, panel, weight_scales, sums, 0 if at else size)
            _put(sums, at, count, panel, bias, out, add)
            at += count


@njit(**_EXACT, cache=True)
def _multiply_integers(x, values, shift, weight, out, add):  # type: ignore[no-untyped-def]
    """values: room for x in integers, [N, G * inputs of a group]."""
    rows, groups = len(x), weight[1].shape[1]
    scales = np.empty((rows, groups), np.float32)
    starts = np.empty((rows, groups), np.int32)
    quantise(x, values, scales, starts, values.shape[1] // groups, shift)
    multiply_quantised(values, scales, starts, weight[0], weight[1], weight[2], out, add)


@njit(**_EXACT, cache=True)
def multiply(x, weight, out, add):  # type: ignore[no-untyped-def]
    """out [N, out] = x [N, in] @ weight.T + bias, or added to it; weight: Panels."""
    _multiply(x, weight, out, add)


def _multiply(x, weight, out, add):  # type: ignore[no-untyped-def]
    raise NotImplementedError("compiled code only")


@overload(_multiply)
def _by_kind(x, weight, out, add):  # type: ignore[no-untyped-def]
    numbers, scales, _ = weight.types
    if scales.dtype == types.uint16:

        def int4(x, weight, out, add):  # type: ignore[no-untyped-def]
            values = np.empty((len(x), weight[1].shape[1] * NIBBLES), np.int8)
            _multiply_integers(x, values, 1, weight, out, add)

        return int4
    if numbers.dtype in (types.uint8, types.int8):

        def int8(x, weight, out, add):  # type: ignore[no-untyped-def]
            values = np.empty((len(x), weight[1].shape[1] * GROUP), _VALUE)
            # weights are shifted by 128 to be unsigned where values are bytes
            _multiply_integers(x, values, -128 if DEPTH == 4 else 0, weight, out, add)

        return int8
    return lambda x, weight, out, add: _multiply_floats(x, weight[0], weight[2], out, add)


# Attention, norms, activations

SILU, GELU, GELU_TANH, RELU = range(4)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts, the first exact


@intrinsic
def _bits(typing, x):  # type: ignore[no-untyped-def]
    """The bits of a float as an integer."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def _float(typing, bits):  # type: ignore[no-untyped-def]
    """The float that has these bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _F32)


@intrinsic
def _power_of_two(typing, k):  # type: ignore[no-untyped-def]
    """2^k for a whole k in -126..127, from the bits of a float."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        whole = builder.fptosi(args[0], _I32)
        return builder.bitcast(builder.shl(builder.add(whole, _I32(127)), _I32(23)), _F32)

    return types.float32(types.float32), build


@njit(**_FAST)
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x = 2^k x e^r, |r| <= ln(2)/2, with a polynomial for e^r (Moshier's Cephes, expf); x is kept within +-87.

    Plain arithmetic, which becomes SIMD where a call of the library's exp does not. NaN stays NaN.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(87.0) if x > np.float32(87.0) else x
    k = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _power_of_two(k)


@njit(**_FAST, cache=True)
def _exponentials(row):  # type: ignore[no-untyped-def]
    """row -> exp(row - max(row)) in place; returns their sum."""
    most = np.int32(-(2**31))  # numbers in the order of the floats, as their maximum becomes SIMD; NaN is the highest
    for j in range(len(row)):
        bits = _bits(row[j])
        most = max(most, bits ^ ((bits >> 31) & _ABS))
    highest = _float(most ^ ((most >> 31) & _ABS))
    total = np.float32(0.0)
    for j in range(len(row)):
        row[j] = _exp(row[j] - highest)
        total += row[j]
    return total


def _tree(builder, vectors):  # type: ignore[no-untyped-def]
    """One vector with the sum over the lanes of each of LANES vectors; lanes are added up in pairs, then pairs."""
    width = 1
    while len(vectors) > 1:
        low = [at + n + way for at in range(0, LANES, 2 * width) for way in (0, LANES) for n in range(width)]
        first, second = (ir.Constant(_INTS, [at + shift for at in low]) for shift in (0, width))
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width *= 2
    return vectors[0]


@intrinsic(prefer_literal=True)
def _key_tile(typing, queries, q, q_at, flat, k_at, left, dim, scale, out, out_at, out_stride):  # type: ignore[no-untyped-def]
    """out[r, :n] = scale x q[r] . keys[:n] for some queries r and n = LANES / queries keys; `queries` is a literal.

    q is fp32, from element q_at on, its rows `dim` apart, which is a multiple of LANES; keys are those from element
    k_at of the pool on. If fewer than n are `left`, the last one stands for those beyond it.
    """

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _, q_array, q_at, pool, k_at, left, dim, scale, scores, out_at, out_stride = args
        rows, last = range(queries.literal_value), builder.sub(left, _I64(1))
        keys = range(LANES // len(rows))
        q_base = builder.gep(_data(context, builder, q, q_array), [q_at])
        k_base = builder.gep(_data(context, builder, flat, pool), [k_at])
        q_rows = [builder.gep(q_base, [builder.mul(dim, _I64(row))]) for row in rows]
        k_rows = []
        for key in keys:
            there = builder.select(builder.icmp_signed("<", _I64(key), last), _I64(key), last)
            k_rows.append(builder.gep(k_base, [builder.mul(dim, there)]))
        loop = _Loop(builder, builder.udiv(dim, _I64(LANES)), [_ZERO] * LANES)
        place = builder.mul(loop.at, _I64(LANES))
        k_parts = [_widened(builder, flat.dtype, line, place) for line in k_rows]
        chains = iter(loop.carried)
        longer = []
        for line in q_rows:
            q_part = _load(builder, line, place, _FLOATS)
            longer += [_chain(builder, q_part, k_part, next(chains)) for k_part in k_parts]
        loop.end(longer)
        total = builder.fmul(_tree(builder, longer), _splat(builder, scale))
        base = builder.gep(_data(context, builder, out, scores), [out_at])
        for row in rows:
            ours = ir.Constant(ir.VectorType(_I32, len(keys)), [row * len(keys) + key for key in keys])
            _store(builder, builder.shuffle_vector(total, total, ours), base, builder.mul(out_stride, _I64(row)))
        return context.get_dummy_value()

    at = types.intp
    return types.void(queries, q, at, flat, at, at, at, types.float32, out, at, at), build


@intrinsic
def _get(typing, flat, at):  # type: ignore[no-untyped-def]
    """Number `at` of the pool, as fp32."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = builder.load(builder.gep(_data(context, builder, flat, args[0]), [args[1]]))
        return value if flat.dtype == types.float32 else builder.fpext(builder.bitcast(value, _F16), _F32)

    return types.float32(flat, types.intp), build


@intrinsic
def _set(typing, flat, at, value):  # type: ignore[no-untyped-def]
    """Number `at` of the pool = value, rounded to the nearest that it can hold."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = args[2]
        if flat.dtype != types.float32:
            value = builder.bitcast(builder.fptrunc(value, _F16), _I16)
        builder.store(value, builder.gep(_data(context, builder, flat, args[0]), [args[1]]))
        return context.get_dummy_value()

    return types.void(flat, types.intp, types.float32), build


@intrinsic
def _prefetch(typing, flat, at):  # type: ignore[no-untyped-def]
    """Asks for the cache line with element `at` of the pool."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _ask(builder, _data(context, builder, flat, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(flat, types.intp), build


@njit(**_FAST)
def _look_ahead(flat, at, length, half, ahead):  # type: ignore[no-untyped-def]
    """Asks for the keys that come `ahead` elements later and for the values: memory's own look-ahead ends at a page."""
    for place in range(at, at + length, 64 // flat.itemsize):
        _prefetch(flat, place + ahead)
        _prefetch(flat, place + half)


@njit(**_FAST)
def _scores(q, many, flat, base, half, count, scale, out):  # type: ignore[no-untyped-def]
    """out [Q, :count] = scale x q [Q, D] . keys for the first `many` queries; keys [count, D] from element `base` on.

    q is filled up to a multiple of 4 queries, out to that and, in keys, to a multiple of LANES. Values lie `half`
    elements after the keys.
    """
    dim, width = q.shape[1], out.shape[1]
    if dim % LANES:
        for row in range(many):
            for j in range(count):
                total = np.float32(0.0)
                for d in range(dim):
                    total += q[row, d] * _get(flat, base + j * dim + d)
                out[row, j] = total * scale
        return
    at = 0
    while many - at > 1:
        for j in range(0, count, LANES // 4):
            if at == 0:
                _look_ahead(flat, base + j * dim, LANES // 4 * dim, half, LANES * dim)
            _key_tile(4, q, at * dim, flat, base + j * dim, count - j, dim, scale, out, at * width + j, width)
        at += 4
    if at < many:
        for j in range(0, count, LANES):
            if at == 0:
                _look_ahead(flat, base + j * dim, LANES * dim, half, LANES * dim)
            _key_tile(1, q, at * dim, flat, base + j * dim, count - j, dim, scale, out, at * width + j, width)


@njit(**_FAST)
def _mix(weights, count, flat, base, sums, out):  # type: ignore[no-untyped-def]
    """out [Q, D] = weights [Q, :count] . V; V [count, D] begins at element `base`."""
    (rows, dim), width = out.shape, weights.shape[1]
    for column in range(0, dim - PANEL + 1, PANEL):
        at = 0
        while at < rows:
            made = tiles(rows - at, weights, at * width, width, flat, base + column, dim, count, sums)
            for row in range(made):
                for d in range(PANEL):
                    out[at + row, column + d] = sums[row, d]
            at += made
    for column in range(dim // PANEL * PANEL, dim):
        for row in range(rows):
            total = np.float32(0.0)
            for j in range(count):
                total += weights[row, j] * _get(flat, base + j * dim + column)
            out[row, column] = total


@njit(**_FAST)
def _rotate(row, cos, sin):  # type: ignore[no-untyped-def]
    """RoPE of one head in place: pairs are (i, i + D/2)."""
    half = len(cos)
    for i in range(half):
        first, second = row[i], row[half + i]
        row[i] = first * cos[i] - second * sin[i]
        row[half + i] = second * cos[i] + first * sin[i]


@njit(**_FAST)
def _write(n, qkv, turns, flat, k_at, v_at, lane):  # type: ignore[no-untyped-def]
    """Rotates row n's Q and K; K and V go into the pool from elements k_at and v_at on."""
    (queries, keys, values), (cos, sin) = qkv, turns
    for head in range(queries.shape[1]):
        _rotate(queries[n, head], cos[n], sin[n])
    for head in range(keys.shape[1]):
        key, value = keys[n, head], values[n, head]
        _rotate(key, cos[n], sin[n])
        for d in range(len(key)):
            _set(flat, k_at + head * lane + d, key[d])
            _set(flat, v_at + head * lane + d, value[d])


@njit(**_FAST)
def _attend(q, rows, kv, group, positions, window, flat, base, half, scale, out):  # type: ignore[no-untyped-def]
    """One kv head's part of `attend` for neighbouring rows (begin, stop) of a sequence; its keys begin at `base`."""
    begin, stop = rows
    dim, many = q.shape[2], (stop - begin) * group
    filled = -(-many // 4) * 4
    first = max(0, positions[begin] + 1 - window)
    count = positions[stop - 1] + 1 - first
    ours = np.zeros((filled, dim), np.float32)
    scores = np.zeros((filled, -(-count // LANES) * LANES), np.float32)
    sums = np.empty((TILE, PANEL), np.float32)
    totals = np.empty(many, np.float32)
    for row in range(many):
        ours[row] = q[begin + row // group, kv * group + row % group]
    _scores(ours, many, flat, base + first * dim, half, count, scale, scores)
    for row in range(many):
        position = positions[begin + row // group]
        low, high = max(0, position + 1 - window) - first, position + 1 - first
        scores[row, :low] = np.float32(0.0)
        scores[row, high:] = np.float32(0.0)
        totals[row] = _exponentials(scores[row, low:high])
    _mix(scores, count, flat, base + half + first * dim, sums, ours)
    for row in range(many):
        mixed = out[begin + row // group, kv * group + row % group]
        for d in range(dim):
            mixed[d] = ours[row, d] / totals[row]


@njit(**_FAST, cache=True, parallel=True)
def attend(qkv, turns, flat, layers, lane, where, out):  # type: ignore[no-untyped-def]
    """Rotates Q and K in place, writes K and V to the pool; out [N, H, D] = softmax(q K^T / sqrt(D)) V.

    qkv: q [N, H, D], k and v [N, K, D]; turns: cos and sin [N, D/2]; flat: the pool [slot, layers, 2, K, lane] in fp32
    or bits of fp16, a lane being the rows [max_context, D] of one head and what fills up its last page; where: slots
    [N], positions [N], layer and window. Row n looks at the last `window` rows up to positions[n] of its own slot:
    query head h reads kv head h // (H // K). Neighbouring rows of one sequence are one thread's, which goes through
    their keys and values once for all of them; to a row, those past its position and behind its window have weight 0,
    which changes no sum.
    """
    slots, positions, layer, window = where
    rows, heads, dim = qkv[0].shape
    kv_heads = qkv[1].shape[1]
    half = kv_heads * lane  # from K to V
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    if rows < _BLOCK:
        for n in range(rows):
            at = (slots[n] * layers + layer) * 2 * half + positions[n] * dim
            _write(n, qkv, turns, flat, at, at + half, lane)
    else:
        for n in prange(rows):
            place = (slots[n] * layers + layer) * 2 * half + positions[n] * dim
            _write(n, qkv, turns, flat, place, place + half, lane)
    begins = np.empty(rows + 1, np.int64)  # block b is rows begins[b]..begins[b + 1] - 1
    blocks = 0
    for n in range(rows):
        follows = n > 0 and slots[n] == slots[n - 1] and positions[n] == positions[n - 1] + 1
        if not follows or n - begins[blocks - 1] == _BLOCK:
            begins[blocks] = n
            blocks += 1
    begins[blocks] = rows
    tasks = blocks * kv_heads
    for turn in prange(tasks):
        task = tasks - 1 - turn // 2 if turn % 2 else turn // 2  # long and short ones in turn: equal shares
        block, kv = task // kv_heads, task % kv_heads
        base = (slots[begins[block]] * layers + layer) * 2 * half + kv * lane
        both = begins[block], begins[block + 1]
        _attend(qkv[0], both, kv, heads // kv_heads, positions, window, flat, base, half, scale, out)


@njit(**_FAST)
def _norm(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    """One row: x / rms(x) * weight (Zhang & Sennrich 2019); with a bias (x - mean) / std * weight + bias (Ba 2016)."""
    width = np.float32(len(x))
    mean = np.float32(0.0)
    if len(bias):
        for i in range(len(x)):
            mean += x[i]
        mean /= width
    total = np.float32(0.0)
    for i in range(len(x)):
        total += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1.0) / np.sqrt(total / width + eps)
    for i in range(len(x)):
        out[i] = (x[i] - mean) * factor * weight[i]
    for i in range(len(bias)):
        out[i] += bias[i]


@njit(**_FAST, cache=True, parallel=True)
def norm(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    """out [N, E] = RMSNorm or LayerNorm of each row of x; RMSNorm has an empty bias."""
    if len(x) < _BLOCK:
        for n in range(len(x)):
            _norm(x[n], weight, bias, eps, out[n])
    else:
        for n in prange(len(x)):
            _norm(x[n], weight, bias, eps, out[n])


@njit(**_FAST)
def _activate(x, kind, gated, out):  # type: ignore[no-untyped-def]
    """One row, as ModelConfig.activation says; gated: act(gate) * up with x = gate beside up (Shazeer 2020)."""
    width = len(out)
    if kind == SILU:
        for i in range(width):
            out[i] = x[i] / (np.float32(1.0) + _exp(-x[i]))
    elif kind == GELU_TANH:  # 0.5 x (1 + tanh(u)) = x / (1 + e^-2u)
        for i in range(width):
            u = np.float32(0.7978845608028654) * (x[i] + np.float32(0.044715) * x[i] * x[i] * x[i])
            out[i] = x[i] / (np.float32(1.0) + _exp(np.float32(-2.0) * u))
    elif kind == GELU:
        for i in range(width):
            out[i] = np.float32(0.5) * x[i] * np.float32(1.0 + math.erf(x[i] * 0.7071067811865476))
    else:
        for i in range(width):
            out[i] = x[i] if x[i] > 0 or x[i] != x[i] else np.float32(0.0)
    if gated:
        for i in range(width):
            out[i] *= x[width + i]


@njit(**_FAST, cache=True, parallel=True)
def activate(x, kind, gated, out):  # type: ignore[no-untyped-def]
    """out [N, M] = the MLP's activation of each row of x, [N, M] or, gated, [N, 2M]."""
    if len(x) < _BLOCK:
        for n in range(len(x)):
            _activate(x[n], kind, gated, out[n])
    else:
        for n in prange(len(x)):
            _activate(x[n], kind, gated, out[n])


class Layer(NamedTuple):
    """One block's weights; what the model does not have is empty.

    Those of all blocks are a Layer too, whose arrays have one dimension more in front.
    """

    attention_norm: Floats  # [E]
    attention_norm_bias: Floats
    qkv: Panels
    q_norm: Floats  # [D]
    k_norm: Floats
    out: Panels
    mlp_norm: Floats  # [E]
    mlp_norm_bias: Floats
    up: Panels
    down: Panels
    window: Any  # rows


class Model(NamedTuple):
    """What the blocks have in common, and what comes after them."""

    layers: int
    heads: int
    kv_heads: int
    activation: int
    gated: bool
    vocab_size: int
    eps: np.float32
    norm: Floats  # [E]
    norm_bias: Floats
    head: Panels


class Buffers(NamedTuple):
    """Room for what a block computes of N rows, used by all blocks in turn."""

    normed: Floats  # [N, E]
    qkv: Floats  # [N, H + 2K, D]
    mixed: Floats  # [N, H, D]
    wide: Floats  # [N, mlp_width], gated [N, 2 mlp_width]
    active: Floats  # [N, mlp_width]


@njit(**_EXACT)
def _panels(stacked, at):  # type: ignore[no-untyped-def]
    return Panels(stacked.numbers[at], stacked.scales[at], stacked.bias[at])


@njit(**_EXACT)
def _layer(stacked, at):  # type: ignore[no-untyped-def]
    """Block `at` of the weights of all."""
    return Layer(
        stacked.attention_norm[at],
        stacked.attention_norm_bias[at],
        _panels(stacked.qkv, at),
        stacked.q_norm[at],
        stacked.k_norm[at],
        _panels(stacked.out, at),
        stacked.mlp_norm[at],
        stacked.mlp_norm_bias[at],
        _panels(stacked.up, at),
        _panels(stacked.down, at),
        stacked.window[at],
    )


@njit(**_EXACT)
def block(x, at, layer, model, room, turns, flat, lane, slots, positions):  # type: ignore[no-untyped-def]
    """Block `at` on x [N, E], in place. room: Buffers; turns: cos and sin [N, D/2]; the others as in `attend`."""
    rows, heads, kv_heads = len(x), model.heads, model.kv_heads
    q, k, v = room.qkv[:, :heads], room.qkv[:, heads : heads + kv_heads], room.qkv[:, heads + kv_heads :]
    norm(x, layer.attention_norm, layer.attention_norm_bias, model.eps, room.normed)
    multiply(room.normed, layer.qkv, room.qkv.reshape(rows, -1), False)
    if len(layer.q_norm):
        for head in range(heads):
            norm(q[:, head], layer.q_norm, layer.q_norm[:0], model.eps, q[:, head])
        for head in range(kv_heads):
            norm(k[:, head], layer.k_norm, layer.k_norm[:0], model.eps, k[:, head])
    where = slots, positions, at, layer.window
    attend((q, k, v), turns, flat, model.layers, lane, where, room.mixed)
    multiply(room.mixed.reshape(rows, -1), layer.out, x, True)
    norm(x, layer.mlp_norm, layer.mlp_norm_bias, model.eps, room.normed)
    multiply(room.normed, layer.up, room.wide, False)
    activate(room.wide, model.activation, model.gated, room.active)
    multiply(room.active, layer.down, x, True)


@njit(**_EXACT, cache=True)
def forward(x, layers, model, room, turns, flat, lane, slots, positions, sample_rows):  # type: ignore[no-untyped-def]
    """All blocks on x [N, E], in place, then norm and head of some of its rows: logits [S, vocab].

    One call a step: between calls of its parts the threads would fall asleep.
    """
    for at in range(model.layers):
        block(x, at, _layer(layers, at), model, room, turns, flat, lane, slots, positions)
    chosen = x[sample_rows]
    scores = np.empty((len(chosen), model.vocab_size), np.float32)
    if len(chosen):
        norm(chosen, model.norm, model.norm_bias, model.eps, chosen)
        multiply(chosen, model.head, scores, False)
    return scores
