"""e^x and softmax's numerators in plain arithmetic, which becomes SIMD where a call of the library's exp does not."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from tokenteller.model.kernels.emit import F32, I32
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


@njit(**FAST, inline="always")
def exponentials(row):  # type: ignore[no-untyped-def]
    """row -> exp(row - max(row)) in place; returns their sum."""
    most = np.int32(-(2**31))  # integers in the order of the floats: their maximum becomes SIMD, and NaN is the highest
    for j in range(len(row)):
        bits = _bits(row[j])
        most = max(most, bits ^ ((bits >> 31) & _ABS))
    highest = _float(most ^ ((most >> 31) & _ABS))
    total = np.float32(0.0)
    for j in range(len(row)):
        row[j] = exp(row[j] - highest)
        total += row[j]
    return total
