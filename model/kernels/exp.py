"""e^x and softmax's numerators in plain arithmetic, which becomes SIMD where a call of the library's exp does not."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenteller.model.kernels.emit import F32, I32, I64, Loop, load, sum_halves
from tokenteller.model.kernels.target import FAST

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts, the first exact
_ABS = np.int32(0x7FFFFFFF)


@intrinsic
def _bits(typing, x):  # type: ignore[no-untyped-def]
    """The bits of a float as an integer."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


@intrinsic
def _float(typing, bits):  # type: ignore[no-untyped-def]
    """The float that has these bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic
def _power_of_two(typing, k):  # type: ignore[no-untyped-def]
    """2^k for a whole k in -126..127, from the bits of a float."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        whole = builder.fptosi(args[0], I32)
        return builder.bitcast(builder.shl(builder.add(whole, I32(127)), I32(23)), F32)

    return types.float32(types.float32), build


@njit(**FAST, inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """e^x = 2^k x e^r, |r| <= ln(2)/2, with a polynomial for e^r (Moshier's Cephes, expf); x is kept within +-87.

    NaN stays NaN.
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


@intrinsic
def _sum(typing, row):  # type: ignore[no-untyped-def]
    """The sum of a contiguous row of fp32, in one order on every CPU: 64 lanes at a time, then 8, then one by one."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        array = context.make_array(row)(context, builder, args[0])
        base, length = array.data, builder.extract_value(array.shape, 0)
        total = cgutils.alloca_once_value(builder, F32(0.0))
        wide = builder.udiv(length, I64(64))
        with builder.if_then(builder.icmp_signed("!=", wide, I64(0))):
            loop = Loop(builder, wide, [ir.Constant(ir.VectorType(F32, 16), [0.0] * 16)] * 4)
            at = builder.mul(loop.at, I64(64))
            parts = [load(builder, base, builder.add(at, I64(16 * n)), ir.VectorType(F32, 16)) for n in range(4)]
            sums = [builder.fadd(before, part) for before, part in zip(loop.carried, parts, strict=True)]
            loop.end(sums)
            together = sums[0]
            for part in sums[1:]:
                together = builder.fadd(part, together)
            builder.store(sum_halves(builder, together), total)
        done = builder.mul(wide, I64(64))
        narrow = builder.udiv(builder.sub(length, done), I64(8))
        with builder.if_then(builder.icmp_signed("!=", narrow, I64(0))):
            zeros = ir.Constant(ir.VectorType(F32, 8), [0.0] * 8)
            loop = Loop(builder, narrow, [builder.insert_element(zeros, builder.load(total), I32(0))])
            at = builder.add(done, builder.mul(loop.at, I64(8)))
            sums = [builder.fadd(loop.carried[0], load(builder, base, at, zeros.type))]
            loop.end(sums)
            builder.store(sum_halves(builder, sums[0]), total)
        done = builder.add(done, builder.mul(narrow, I64(8)))
        with cgutils.for_range_slice(builder, done, length, I64(1)) as (at, _):
            builder.store(builder.fadd(builder.load(total), builder.load(builder.gep(base, [at]))), total)
        return builder.load(total)

    return types.float32(row), build


@njit(**FAST, inline="always")
def exponentials(row):  # type: ignore[no-untyped-def]
    """row -> exp(row - max(row)) in place; returns their sum."""
    most = np.int32(-(2**31))  # integers in the order of the floats: their maximum becomes SIMD, and NaN is the highest
    for j in range(len(row)):
        bits = _bits(row[j])
        most = max(most, bits ^ ((bits >> 31) & _ABS))
    highest = _float(most ^ ((most >> 31) & _ABS))
    for j in range(len(row)):
        row[j] = exp(row[j] - highest)
    return _sum(row)
