"""A whole step in one call: between calls from Python the threads would fall asleep."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tokenteller.model.kernels.attention import attend
from tokenteller.model.kernels.elementwise import activate, norm
from tokenteller.model.kernels.launch import entry
from tokenteller.model.kernels.products import MULTIPLIERS, Floats, Panels, weight_format
from tokenteller.model.kernels.target import EXACT


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


class Workspace(NamedTuple):
    """Arrays for what a block computes of N rows, used by all blocks in turn."""

    normed: Floats  # [N, E]
    qkv: Floats  # [N, H + 2K, D]
    mixed: Floats  # [N, H, D]
    wide: Floats  # [N, mlp_width], gated [N, 2 mlp_width]
    active: Floats  # [N, mlp_width]


@njit(**EXACT, inline="always")
def _panels(stacked, at):  # type: ignore[no-untyped-def]
    return Panels(stacked.numbers[at], stacked.scales[at], stacked.bias[at])


@njit(**EXACT, inline="always")
def _norm_heads(x, weight, eps):  # type: ignore[no-untyped-def]
    """Each head of x [N, heads, D] in place."""
    for head in range(x.shape[1]):
        norm(x[:, head], weight, weight[:0], eps, x[:, head])


@njit(**EXACT, inline="always")
def _keep_heads(x, weight, eps):  # type: ignore[no-untyped-def]
    """For models that do not normalise queries and keys, which so do not compile `_norm_heads`."""


@cache
def forward_named(name: str) -> Any:
    """`forward` for the variant that `name` spells, as forward_for puts it together."""
    _, heads, *formats = name.split(".")
    norm_heads = _norm_heads if heads == "qk_norm" else _keep_heads
    qkv_product, out_product, up_product, down_product, head_product = (MULTIPLIERS[each] for each in formats)

    def step(x, layers, model, work, turns, flat, lane, slots, positions, sample_rows):  # type: ignore[no-untyped-def]
        """All blocks on x [N, E], in place, then norm and head of some of its rows: logits [S, vocab].

        layers: Layer of all blocks; model: Model; work: Workspace; turns: RoPE's cos and sin [N, D/2]; the others as in
        `attend`.
        """
        heads, kv_heads = model.heads, model.kv_heads
        q, k, v = work.qkv[:, :heads], work.qkv[:, heads : heads + kv_heads], work.qkv[:, heads + kv_heads :]
        qkv, mixed = work.qkv.reshape(len(x), -1), work.mixed.reshape(len(x), -1)
        for at in range(model.layers):
            norm(x, layers.attention_norm[at], layers.attention_norm_bias[at], model.eps, work.normed)
            qkv_product(work.normed, _panels(layers.qkv, at), qkv, False)
            norm_heads(q, layers.q_norm[at], model.eps)
            norm_heads(k, layers.k_norm[at], model.eps)
            where = slots, positions, at, layers.window[at]
            attend((q, k, v), turns, flat, model.layers, lane, where, work.mixed)
            out_product(mixed, _panels(layers.out, at), x, True)
            norm(x, layers.mlp_norm[at], layers.mlp_norm_bias[at], model.eps, work.normed)
            up_product(work.normed, _panels(layers.up, at), work.wide, False)
            activate(work.wide, model.activation, model.gated, work.active)
            down_product(work.active, _panels(layers.down, at), x, True)
        chosen = x[sample_rows]
        scores = np.empty((len(chosen), model.vocab_size), np.float32)
        if len(chosen):
            norm(chosen, model.norm, model.norm_bias, model.eps, chosen)
            head_product(chosen, model.head, scores, False)
        return scores

    return entry(step, name)


def forward_for(layers: Layer, model: Model) -> Any:
    """The compiled forward of a model."""
    weights = layers.qkv, layers.out, layers.up, layers.down, model.head
    heads = "qk_norm" if layers.q_norm.size else "plain"
    return forward_named(".".join(["forward", heads, *map(weight_format, weights)]))
