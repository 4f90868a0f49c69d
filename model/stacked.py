"""A decoder's weights as `kernels.forward` takes them: those of a kind, of all blocks, in one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenteller.model import kernels
from tokenteller.model.config import ModelConfig
from tokenteller.model.layers import Block, LayerNorm, Norm, RMSNorm
from tokenteller.model.linear import Linear


def stacked_layers(blocks: Sequence[Block]) -> kernels.Layer:
    """The weights of all blocks, of which the blocks keep views."""
    qkv, out, up, down = (_stacked(kind) for kind in zip(*(block.linears() for block in blocks), strict=True))
    attention, attention_bias = _stacked_norms([block.attention_norm for block in blocks])
    q, _ = _stacked_norms([block.attention.q_norm for block in blocks])
    k, _ = _stacked_norms([block.attention.k_norm for block in blocks])
    mlp, mlp_bias = _stacked_norms([block.mlp_norm for block in blocks])
    windows = np.array([block.attention.window for block in blocks])
    return kernels.Layer(attention, attention_bias, qkv, q, k, out, mlp, mlp_bias, up, down, windows)


def compiled_model(config: ModelConfig, norm: Norm, head: Linear) -> kernels.Model:
    return kernels.Model(
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        kernels.ACTIVATIONS[config.activation],
        config.gated_mlp,
        config.vocab_size,
        np.float32(config.norm_eps),
        *_vectors(norm),
        _panels(head),
    )


def _vectors(norm: Callable[[torch.Tensor], torch.Tensor] | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A norm's weight and bias as arrays, empty where there is none."""
    parts = (getattr(norm, "weight", None), getattr(norm, "bias", None))
    weight, bias = (np.empty(0, np.float32) if part is None else part.numpy() for part in parts)
    return weight, bias


def _stacked_norms(
    norms: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights [layers, E] and biases of one norm in all blocks; the norms keep views."""
    weights, biases = (np.stack(parts) for parts in zip(*map(_vectors, norms), strict=True))
    for norm, weight, bias in zip(norms, weights, biases, strict=True):
        if isinstance(norm, RMSNorm | LayerNorm):
            norm.weight = torch.from_numpy(weight)
        if isinstance(norm, LayerNorm):
            norm.bias = torch.from_numpy(bias)
    return weights, biases


def _panels(linear: Linear) -> kernels.Panels:
    assert linear.panels is not None
    return linear.panels


def _stacked(linears: Sequence[Linear]) -> kernels.Panels:
    """The panels of one product in all blocks as one array each; the products keep views."""
    stacked = kernels.Panels(*map(np.stack, zip(*map(_panels, linears), strict=True)))
    for at, linear in enumerate(linears):
        linear.panels = kernels.Panels(*(part[at] for part in stacked))
    return stacked
