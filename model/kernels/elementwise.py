"""Norms and activations, each row alone."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tokenteller.model.config import Activation
from tokenteller.model.kernels.exp import exp
from tokenteller.model.kernels.launch import entry, kernel
from tokenteller.model.kernels.target import FAST, FEW

SILU, GELU, GELU_TANH, RELU = range(4)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}


# Not inline: LLVM would split the sum into other parts, and its bits would be others.
@njit(**FAST)
def _norm_row(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
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
