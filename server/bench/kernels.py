"""Splits a decoder's forward, which is one compiled call, by calling its kernels one by one on the same shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenteller.model import kernels
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear
from tokenteller.server.bench.clock import seconds_of


def kernel_seconds(decoder: Decoder, pool: KVPool, rows: int, context: int) -> dict[str, float]:
    """Seconds of products, attention and the rest, each for all layers, of `rows` sequences with `context` tokens."""
    c, model = decoder.config, decoder._model
    layers = [_layer(decoder._layers, at) for at in range(c.num_layers)]
    x, normed = np.ones((2, rows, c.width), np.float32)
    heads = np.cumsum((c.num_heads, c.num_kv_heads))
    qkv = np.ones((rows, heads[-1] + c.num_kv_heads, c.head_dim), np.float32)
    mixed = np.zeros((rows, c.num_heads, c.head_dim), np.float32)
    wide = np.ones((rows, (2 if c.gated_mlp else 1) * c.mlp_width), np.float32)
    active, logits = (np.zeros((rows, width), np.float32) for width in (c.mlp_width, c.vocab_size))
    slots, positions, ids = np.arange(rows), np.full(rows, context), torch.zeros(rows, dtype=torch.int64)
    turns = tuple(part.numpy() for part in decoder.rope(torch.from_numpy(positions)))
    pool.kv[:rows, :, :, :, : context + 1] = 0.5  # pages never written to all map to one zero page

    def products() -> None:
        for layer in layers:
            kernels.multiply(normed, layer.qkv, qkv.reshape(rows, -1), False)
            kernels.multiply(mixed.reshape(rows, -1), layer.out, x, True)
            kernels.multiply(normed, layer.up, wide, False)
            kernels.multiply(active, layer.down, x, True)
        kernels.multiply(normed, model.head, logits, False)

    def attention() -> None:
        split = tuple(np.split(qkv, heads, axis=1))
        for at, layer in enumerate(layers):
            where = (slots, positions, at, layer.window)
            kernels.attend(split, turns, pool.flat, model.layers, pool.lane, where, mixed)

    def elementwise() -> None:
        decoder.embed(ids)
        for layer in layers:
            kernels.norm(x, layer.attention_norm, layer.attention_norm_bias, model.eps, normed)
            kernels.norm(x, layer.mlp_norm, layer.mlp_norm_bias, model.eps, normed)
            kernels.activate(wide, model.activation, model.gated, active)
        kernels.norm(x, model.norm, model.norm_bias, model.eps, normed)

    seconds = {part.__name__: seconds_of(part) for part in (products, attention, elementwise)}
    for slot in range(rows):
        pool.release(slot)
    return seconds


def _layer(stacked: kernels.Layer, at: int) -> kernels.Layer:
    """One layer of weights that are stacked by layer."""
    parts: list[Any] = []
    for part in stacked:
        panels = isinstance(part, kernels.Panels)
        parts.append(kernels.Panels(*(array[at] for array in part)) if panels else part[at])
    return kernels.Layer(*parts)


def roofline(decoder: Decoder, kv_bytes: int, rows: int, context: int) -> dict[str, float]:
    """What a step must read and compute, this machine's rates for both, and the seconds of the slower one.

    kv_bytes: K/V that one sequence's attention reads.
    """
    c, linears = decoder.config, list(decoder.linears())
    read = sum(array.nbytes for linear in linears for array in linear.panels or ()) + rows * kv_bytes
    attended = 4 * c.num_layers * c.num_heads * c.head_dim * context
    operations = rows * (sum(2 * linear.shape[0] * linear.shape[1] for linear in linears) + attended)
    numbers = torch.ones(read // 4)  # as much as a step reads, so it sits in the same level of cache
    bytes_per_s = read / seconds_of(numbers.sum)
    square, x = Linear(torch.ones(1024, 1024), decoder.storage), torch.ones(256, 1024)
    operations_per_s = 2 * 256 * 1024**2 / seconds_of(lambda: square(x))
    return {
        "bytes": read,
        "bytes_per_s": bytes_per_s,
        "operations": operations,
        "operations_per_s": operations_per_s,
        "seconds": max(read / bytes_per_s, operations / operations_per_s),
    }
