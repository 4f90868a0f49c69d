"""Integer dot products of one group, in the widest instructions this CPU has."""

from __future__ import annotations

from llvmlite import ir

import tokenteller.model.kernels.emit as emit
from tokenteller.model.kernels.emit import COLUMNS, I8, I16, I64, INTS
from tokenteller.model.kernels.target import DEPTH, GROUP, LANES, NIBBLES, PANEL, WIDE

_PAIRS = ir.VectorType(I16, 2 * LANES)
_QUADS = ir.VectorType(I8, 4 * LANES)


def _dot(builder, depth, weights, values, total):  # type: ignore[no-untyped-def]
    """total + weights . values for LANES outputs: `depth` bytes of each in one 32-bit place of the other operand."""
    if depth == 4:
        return emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, weights, values)
    if depth == 2:
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
        return builder.add(total, emit.call(builder, name, INTS, weights, builder.bitcast(values, _PAIRS)))
    return builder.add(total, builder.mul(weights, values))


def _dot_of_bytes(builder, weights, values, total):  # type: ignore[no-untyped-def]
    """total + weights . values over the 4 bytes of each place, one by one; values have a sign."""
    for byte in range(4):
        left, right = emit.constant(24 - 8 * byte), emit.constant(24)
        weight = builder.lshr(builder.shl(weights, left), right)
        total = builder.add(total, builder.mul(weight, builder.ashr(builder.shl(values, left), right)))
    return total


def _bytes(builder, depth, base, index):  # type: ignore[no-untyped-def]
    """`depth` weights of LANES outputs each, as _dot wants them: unsigned bytes, 16-bit pairs or 32-bit numbers."""
    if depth == 4:
        return emit.load(builder, base, index, INTS)
    kind = _PAIRS if depth == 2 else INTS
    return builder.sext(emit.load(builder, base, index, ir.VectorType(I8, depth * LANES)), kind)


def group_of_bytes(builder, depth, group, lines, begins):  # type: ignore[no-untyped-def]
    """Integer sums over one group of int8, by row and column; lines: each row's values, begins: what sums begin at."""
    loop = emit.Loop(builder, I64(GROUP // depth), [begin for begin in begins for _ in COLUMNS])
    place = builder.mul(loop.at, I64(PANEL * depth))
    weights = [_bytes(builder, depth, group, builder.add(place, I64(column * depth))) for column in COLUMNS]
    totals = iter(loop.carried)
    sums = []
    for line in lines:
        value = emit.splat(builder, builder.load(builder.gep(line, [loop.at])))
        sums += [_dot(builder, depth, weight, value, next(totals)) for weight in weights]
    loop.end(sums)
    return sums


def group_of_nibbles(builder, group, lines):  # type: ignore[no-untyped-def]
    """Integer sums over one group of int4, by row and column. A byte holds two weights of 0..15, 4 inputs apart.

    Products of a weight and an int8 value stay below 2^11, so that 16 of them fit in 16 bits: AVX2 adds them up there.
    """
    kind = _PAIRS if DEPTH == 2 else INTS
    sums = [ir.Constant(kind, None)] * (len(lines) * len(COLUMNS))
    for pair in range(NIBBLES // 8):
        both = [emit.load(builder, group, I64(4 * (pair * PANEL + column)), INTS) for column in COLUMNS]
        for half in (0, 1):
            shifted = [builder.lshr(part, emit.constant(4)) if half else part for part in both]
            weights = [builder.and_(part, emit.constant(0x0F0F0F0F)) for part in shifted]
            totals, sums = iter(sums), []
            for line in lines:
                value = emit.splat(builder, builder.load(builder.gep(line, [I64(2 * pair + half)])))
                sums += [_add_nibbles(builder, weight, value, next(totals)) for weight in weights]
    if DEPTH != 2:
        return sums
    return [_dot(builder, 2, total, emit.constant(0x00010001), emit.constant(0)) for total in sums]


def _add_nibbles(builder, weights, values, total):  # type: ignore[no-untyped-def]
    """total + weights . values for 4 weights of 0..15 a place; with AVX2 in pairs of 16 bits."""
    if DEPTH == 4:
        return _dot(builder, 4, weights, values, total)
    if DEPTH == 2:
        name = "llvm.x86.avx512.pmaddubs.w.512" if WIDE else "llvm.x86.avx2.pmadd.ub.sw"
        operands = builder.bitcast(weights, _QUADS), builder.bitcast(values, _QUADS)
        return builder.add(total, emit.call(builder, name, _PAIRS, *operands))
    return _dot_of_bytes(builder, weights, values, total)
