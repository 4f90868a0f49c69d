"""Attention: QKV projection, RoPE, scaled dot-product attention over a slot, output projection; MHA, GQA and MQA.

Shape letters, here and in decoder.py: B sequences, T new positions, N rows (positions of all sequences in one step),
H query heads, K kv heads, D head_dim, E model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from model.config import ModelConfig
from model.kernels import attend_rows
from model.kv_pool import KVPool
from model.linear import Linear


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors. Row n is the token at one position of the sequence in one slot.

    `tokens` is padded to M >= N rows; the rows past N are computed and thrown away. `sample_rows` names the rows whose
    logits are wanted, padded by repeating the first.
    """

    tokens: torch.Tensor  # [M] int64
    slots: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    sample_rows: torch.Tensor  # [S] int64


def rope_table(config: ModelConfig, max_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_context, D/2], of position x theta^(-2i/D) (Su et al. 2021, "RoFormer")."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies  # [max_context, D/2]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [N, heads, D] with cos, sin [N, D/2]: pairs are (i, i + D/2), as Llama checkpoints are stored."""
    first, second = x.chunk(2, dim=-1)  # [N, heads, D/2] each
    cos, sin = cos[:, None], sin[:, None]  # [N, 1, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)  # [N, heads, D]


def causal_mask(queries: int, keys: int) -> torch.Tensor:
    """[queries, keys] of 0 where a query may look and -inf where not; the last query sees every key."""
    blocked = torch.full((queries, keys), -math.inf)
    return blocked.triu(diagonal=keys - queries + 1)


def scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The textbook's attention: softmax(q k^T / sqrt(D) + mask) v (Vaswani et al. 2017).

    q [..., T, D], k and v [..., n, D], mask [T, n]. Returns scores and weights [..., T, n] and out [..., T, D]. The
    server computes the same in `kernels.attend_rows`; this form is for reading and is the reference.
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask  # [..., T, n]
    weights = scores.softmax(dim=-1)  # [..., T, n]
    return scores, weights, weights @ v


class Attention:
    """One layer's attention. Holds weights only; what it reads and writes is in the arguments."""

    def __init__(self, config: ModelConfig, layer: int, qkv: Linear, out: Linear) -> None:
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = np.float32(1.0 / math.sqrt(config.head_dim))
        self.layer = layer
        self.qkv = qkv
        self.out = out

    def __call__(
        self, x: torch.Tensor, batch: Batch, pool: KVPool, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """x [M, E] -> [M, E]; writes K and V of the batch's N rows to the pool. cos, sin [N, D/2]."""
        rows = batch.slots.shape[0]
        q, k, v = self.project(x)
        q = rotate(q[:rows], cos, sin)  # [N, H, D]
        k = rotate(k[:rows], cos, sin)  # [N, K, D]: rotated once, at its own position, before it is written
        pool.write(self.layer, batch.slots, batch.positions, k, v[:rows])
        mixed = x.new_zeros(x.shape[0], self.heads, self.dim)  # [M, H, D]
        attend_rows(
            q.contiguous().numpy(),
            pool.array,
            batch.slots.numpy(),
            batch.positions.numpy(),
            self.layer,
            self.scale,
            mixed[:rows].numpy(),
        )
        return self.out(mixed.view(x.shape[0], -1))  # [M, E]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [M, E] -> q [M, H, D], k [M, K, D], v [M, K, D], from one product."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)  # [M, H + 2K, D]
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v
