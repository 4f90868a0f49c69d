"""Attention: QKV projection, RoPE, scaled dot-product attention over a slot, output projection.

Multi-head, grouped-query and multi-query, each with or without a sliding window.

Shape letters, here and in decoder.py: B sequences, T new positions, N rows (positions of all sequences in one step),
H query heads, K kv heads, D head_dim, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tokenteller.model.config import ModelConfig, Rope
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear


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

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part.to(device) for part in (self.tokens, self.slots, self.positions, self.sample_rows)))


def rope_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Angle per position of each pair, [D/2]: theta^(-2i/D) (Su et al. 2021), stretched as `rope.kind` says."""
    base = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [D/2]
    plain = 1.0 / base
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)  # rotations within the trained context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)  # 0: long wave, stretched; 1: short wave, kept
        return (1 - blend) * plain / rope.factor + blend * plain
    if rope.kind == "yarn":
        low, high = _yarn_bounds(rope, dim)
        pairs = torch.arange(dim // 2, dtype=torch.float32)
        stretched = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)  # [D/2]: 0 kept, 1 stretched
        return stretched / (rope.factor * base) + (1 - stretched) / base
    return plain


def _yarn_bounds(rope: Rope, dim: int) -> tuple[float, float]:
    """The pairs between which yarn goes over from kept to stretched (Peng et al. 2023, section 3.2)."""

    def pair(rotations: float) -> float:
        return dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


class RopeTable:
    """cos and sin of position x frequency, made in pieces as positions come: a long context costs what it uses."""

    PIECE = 4096  # positions

    def __init__(self, config: ModelConfig, factors: torch.Tensor | None = None, device: str = "cpu") -> None:
        """factors: [D/2], which divide the frequencies. Learned positions rotate nothing: every angle is 0."""
        rope = config.rope or Rope()
        frequencies = rope_frequencies(rope, config.head_dim)  # [D/2]
        if factors is not None:
            frequencies = frequencies / factors.float()
        self._frequencies = frequencies if config.rope else torch.zeros_like(frequencies)
        self._magnitude = rope.attention_factor
        self._device = torch.device(device)
        self.cos = self.sin = torch.empty(0, len(frequencies), device=self._device)  # [positions so far, D/2]

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [N, D/2], of positions [N]."""
        while positions.numel() and int(positions.max()) >= len(self.cos):
            self._grow()
        return self.cos[positions], self.sin[positions]

    def _grow(self) -> None:
        rows = torch.arange(len(self.cos), len(self.cos) + self.PIECE, dtype=torch.float32)
        angles = rows[:, None] * self._frequencies  # [PIECE, D/2]
        cos, sin = (part.to(self._device) for part in (angles.cos(), angles.sin()))
        self.cos = torch.cat((self.cos, cos * self._magnitude))
        self.sin = torch.cat((self.sin, sin * self._magnitude))


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
    server computes the same in `kernels.attend`; this form is for reading and is the reference.
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask  # [..., T, n]
    weights = scores.softmax(dim=-1)  # [..., T, n]
    return scores, weights, weights @ v


def attend_batch(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """What `kernels.attend` computes, in one torch call for a GPU: q [N, H, D] -> [N, H, D].

    kv is the pool's tensor; the rows of one sequence lie together in the batch. Sequences are padded to the longest.
    """
    sequences, owner, counts = slots.unique_consecutive(return_inverse=True, return_counts=True)  # [B], [N], [B]
    at = torch.arange(len(slots), device=q.device) - (counts.cumsum(0) - counts)[owner]  # [N], row within its sequence
    padded = q.new_zeros(len(sequences), int(counts.max()), *q.shape[1:])  # [B, T, H, D]
    padded[owner, at] = q
    last = positions.new_zeros(padded.shape[:2])  # [B, T]; a padded query looks at row 0, so that nothing is NaN
    last[owner, at] = positions
    keys = torch.arange(int(positions.max()) + 1, device=q.device)  # [n]
    seen = (keys <= last[..., None]) & (keys > last[..., None] - window)  # [B, T, n]
    k = kv[:, layer, 0, :, : len(keys)][sequences]  # [B, K, n, D]
    v = kv[:, layer, 1, :, : len(keys)][sequences]  # [B, K, n, D]
    mixed = F.scaled_dot_product_attention(
        padded.transpose(1, 2).to(k.dtype), k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=True
    )  # [B, H, T, D]
    return mixed.transpose(1, 2)[owner, at].to(q.dtype)  # [N, H, D]


class Attention:
    """One layer's attention. Holds weights only; what it reads and writes is in the arguments."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qkv: Linear,
        out: Linear,
        q_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
        k_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.window = config.window(layer) or config.max_context
        self.layer = layer
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(
        self, x: torch.Tensor, batch: Batch, pool: KVPool, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """x [M, E] -> [M, E]; writes K and V of the batch's N rows to the pool. cos, sin [N, D/2]."""
        rows = batch.slots.shape[0]
        q, k, v = self.project(x)  # [M, H, D], [M, K, D], [M, K, D]
        q = rotate(q[:rows], cos, sin)
        k = rotate(k[:rows], cos, sin)  # once, at its own position, before it is written
        pool.write(self.layer, batch.slots, batch.positions, k, v[:rows])
        padded = x.new_zeros(x.shape[0], self.heads, self.dim)  # [M, H, D]
        where = batch.slots, batch.positions, self.layer
        padded[:rows] = attend_batch(q, pool.kv, *where, self.scale, self.window)
        return self.out(padded.view(x.shape[0], -1))  # [M, E]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [M, E] -> q [M, H, D], k [M, K, D], v [M, K, D], from one product; not yet rotated."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)  # [M, H + 2K, D]
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        return q, k, v
