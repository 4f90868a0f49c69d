"""Starts compiling what a model will run before torch is imported and weights are read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import typeof
from numpy.typing import NDArray

import tokenteller.model.kernels.cache as cache
from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.kernels.elementwise import ACTIVATIONS
from tokenteller.model.kernels.forward import Layer, Model, Workspace, forward_for
from tokenteller.model.kernels.products import Panels
from tokenteller.model.kernels.target import DEPTH
from tokenteller.model.kernels.workers import workers

_PROCESSES = 8  # more than that have nothing to compile


def compile_ahead(config: ModelConfig, weights: Storage, kv_dtype: Storage) -> None:
    """Returns at once: worker processes compile `forward` and its kernels, unless the disk cache has them."""
    layers, model = _layers(config, weights), _model(config, weights)
    forward, signature = forward_for(layers, model), forward_types(layers, model, kv_dtype)
    if not forward._cache.holds(signature):
        workers.submit((forward._cache.name, signature), cache.writable(), _PROCESSES)


def forward_types(layers: Layer, model: Model, kv_dtype: Storage) -> tuple[Any, ...]:
    """The types of `forward`'s arguments."""
    rows, indices = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    heads = np.empty((0, 0, 0), np.float32)
    work = Workspace(rows, heads, heads, rows, rows)
    flat = np.empty(0, np.float32 if kv_dtype == "fp32" else np.uint16)
    arguments = (rows, layers, model, work, (rows, rows), flat, 0, indices, indices, indices)
    return tuple(map(typeof, arguments))


def _layers(config: ModelConfig, weights: Storage) -> Layer:
    """Empty arrays of the types that the decoder makes of the weights of all blocks."""
    norm, panels, windows = np.empty((0, 0), np.float32), _panels(weights, stacked=1), np.empty(0, np.int64)
    heads = np.empty((1, 1 if config.qk_norm else 0), np.float32)
    return Layer(norm, norm, panels, heads, heads, panels, norm, norm, panels, panels, windows)


def _model(config: ModelConfig, weights: Storage) -> Model:
    c, norm = config, np.empty(0, np.float32)
    head = _panels("int8" if weights == "int4" else weights, stacked=0)
    activation = ACTIVATIONS[c.activation]
    counts = c.num_layers, c.num_heads, c.num_kv_heads
    return Model(*counts, activation, c.gated_mlp, c.vocab_size, np.float32(c.norm_eps), norm, norm, head)


def _panels(weights: Storage, stacked: int) -> Panels:
    """Empty panels as `packing.pack` makes them; stacked: 1 for those of all blocks in one array."""

    def empty(dimensions: int, dtype: Any) -> NDArray[Any]:
        return np.empty((0,) * (dimensions + stacked), dtype)

    bias = empty(1, np.float32)
    if weights == "int4":
        return Panels(empty(4, np.uint8), empty(4, np.uint16), bias)
    if weights == "int8":
        return Panels(empty(4, np.uint8 if DEPTH == 4 else np.int8), empty(3, np.float32), bias)
    numbers = {"fp32": np.float32, "fp16": np.uint16, "bf16": np.int16}[weights]
    return Panels(empty(3, numbers), empty(3, np.float32), bias)
