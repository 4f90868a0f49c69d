"""Norms and activations, each row alone."""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

import tokenteller.model.kernels.emit as emit
from tokenteller.model.config import Activation
from tokenteller.model.kernels.emit import I64, ZEROS
from tokenteller.model.kernels.exp import exp
from tokenteller.model.kernels.launch import entry, kernel
from tokenteller.model.kernels.target import FAST, FEW, LANES

SILU, GELU, GELU_TANH, RELU = range(4)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}

_REGISTERS = 4  # of a norm's sums


@intrinsic
def _sum(typing, x, mean, squared):  # type: ignore[no-untyped-def]
    """The sum of x - mean, or of its squares; x lies without gaps. The order is fixed here, not by the compiler.

    Element i is added to lane i % (_REGISTERS * LANES); the lanes are added as one tree.
    """

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        base, means = emit.data(context, builder, x, args[0]), emit.splat(builder, args[1])
        length = builder.extract_value(context.make_array(x)(context, builder, args[0]).shape, 0)
        blocks = builder.udiv(builder.add(length, I64(_REGISTERS * LANES - 1)), I64(_REGISTERS * LANES))
        loop = emit.Loop(builder, blocks, [ZEROS] * _REGISTERS)
        totals = []
        for register, total in enumerate(loop.carried):
            at = builder.mul(builder.add(builder.mul(loop.at, I64(_REGISTERS)), I64(register)), I64(LANES))
            value = builder.fsub(emit.load_up_to(builder, base, at, length, means), means)
            added = builder.select(args[2], emit.fma(builder, value, value, total), builder.fadd(total, value))
            totals.append(added)
        loop.end(totals)
        return emit.sum_halves(builder, functools.reduce(builder.fadd, totals))

    return types.float32(x, types.float32, types.boolean), build


# Not inline: LLVM would take the division by the width out of the loop over rows, as a product with its inverse.
@njit(**FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _norm_row(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    width = np.float32(len(x))
    mean = _sum(x, np.float32(0.0), False) / width if len(bias) else np.float32(0.0)
    factor = np.float32(1.0) / np.sqrt(_sum(x, mean, True) / width + eps)
    for i in range(len(x)):
        out[i] = (x[i] - mean) * weight[i] * factor
    for i in range(len(bias)):
        out[i] += bias[i]


@kernel(**FAST)
def norm_rows(begin, stop, x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    """x / rms(x) * weight (Zhang & Sennrich 2019); with a bias (x - mean) / std * weight + bias (Ba et al. 2016)."""
    for n in range(begin, stop):
        _norm_row(x[n], weight, bias, eps, out[n])


@entry
def norm(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    """out [N, E] = RMSNorm or LayerNorm of each row of x; RMSNorm has an empty bias."""
    norm_rows(len(x), len(x) >= FEW, (x, weight, bias, eps, out))


@njit(**FAST, inline="always")
def _activate_row(x, kind, gated, out):  # type: ignore[no-untyped-def]
    width = len(out)
    if kind == SILU:
        for i in range(width):
            out[i] = x[i] / (np.float32(1.0) + exp(-x[i]))
    elif kind == GELU_TANH:  # 0.5 x (1 + tanh(u)) = x / (1 + e^-2u)
        for i in range(width):
            u = np.float32(0.7978845608028654) * (x[i] + np.float32(0.044715) * x[i] * x[i] * x[i])
            out[i] = x[i] / (np.float32(1.0) + exp(np.float32(-2.0) * u))
    elif kind == GELU:
        for i in range(width):
            out[i] = np.float32(0.5) * x[i] * np.float32(1.0 + math.erf(x[i] * 0.7071067811865476))
    else:
        for i in range(width):
            out[i] = x[i] if x[i] > 0 or x[i] != x[i] else np.float32(0.0)
    if gated:
        for i in range(width):
            out[i] *= x[width + i]


@kernel(**FAST)
def activate_rows(begin, stop, x, kind, gated, out):  # type: ignore[no-untyped-def]
    """As ModelConfig.activation says; gated: act(gate) * up with x = gate beside up (Shazeer 2020)."""
    for n in range(begin, stop):
        _activate_row(x[n], kind, gated, out[n])


@entry
def activate(x, kind, gated, out):  # type: ignore[no-untyped-def]
    """out [N, M] = the MLP's activation of each row of x, [N, M] or, gated, [N, 2M]."""
    activate_rows(len(x), len(x) >= FEW, (x, kind, gated, out))
