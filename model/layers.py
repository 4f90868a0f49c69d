"""What a decoder is made of, as tensor code: norms, MLP, block. A GPU runs it; for the CPU it is the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from tokenteller.model.attention import Attention, Batch
from tokenteller.model.config import Activation, ModelConfig
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Embedding:
    """Rows of a table, in fp32."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids].float()


class RMSNorm:
    """x / rms(x) * weight (Zhang & Sennrich 2019), over the last dimension, each row alone."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / std * weight + bias (Ba et al. 2016), over the last dimension, each row alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


class MLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020) with gate and up in one product; without a gate down(act(up(x)))."""

    def __init__(self, config: ModelConfig, up: Linear, down: Linear) -> None:
        self.gated = config.gated_mlp
        self.activate = ACTIVATIONS[config.activation]
        self.up = up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.down(self.activate(self.up(x)))  # [M, E]
        gate, up = self.up(x).chunk(2, dim=-1)  # [M, mlp_width] each
        return self.down(self.activate(gate) * up)  # [M, E]


class Block:
    """Pre-norm residual block."""

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, batch: Batch, pool: KVPool, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), batch, pool, cos, sin)  # [M, E]
        return x + self.mlp(self.mlp_norm(x))  # [M, E]

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down
