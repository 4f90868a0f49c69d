"""The decoder in Llama form: embedding, blocks of attention and SwiGLU behind RMSNorm, head. No state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from model.attention import Attention, Batch, rope_table
from model.config import ModelConfig
from model.kv_pool import KVPool
from model.linear import Linear, Storage, find_safe_rows


class WeightError(ValueError):
    """Weights that do not fit the config; the message names the tensor."""


class RMSNorm:
    """x / rms(x) * weight (Zhang & Sennrich 2019), each row alone."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [M, mlp_width] each
        return self.down(F.silu(gate) * up)  # [M, E]


class Block:
    """Pre-norm residual block."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, batch: Batch, pool: KVPool, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), batch, pool, cos, sin)  # [M, E]
        return x + self.mlp(self.mlp_norm(x))  # [M, E]


class Decoder:
    """Weights and the order in which they are applied."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], storage: Storage = "fp32") -> None:
        """weights: tensors under their Hugging Face names, all of them used. Raises WeightError naming the tensor."""
        take = _Weights(weights, storage)
        e, d, h, k = config.width, config.head_dim, config.num_heads, config.num_kv_heads
        self.config = config
        embedding = take.tensor("model.embed_tokens.weight", config.vocab_size, e)
        self.embedding = embedding.half() if storage == "fp16" else embedding.float()
        self.blocks: list[Block] = []
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}"
            attention = Attention(
                config,
                layer,
                take.linear(
                    e,
                    {
                        f"{at}.self_attn.q_proj.weight": h * d,
                        f"{at}.self_attn.k_proj.weight": k * d,
                        f"{at}.self_attn.v_proj.weight": k * d,
                    },
                ),
                take.linear(h * d, {f"{at}.self_attn.o_proj.weight": e}),
            )
            mlp = MLP(
                take.linear(
                    e, {f"{at}.mlp.gate_proj.weight": config.mlp_width, f"{at}.mlp.up_proj.weight": config.mlp_width}
                ),
                take.linear(config.mlp_width, {f"{at}.mlp.down_proj.weight": e}),
            )
            attention_norm = RMSNorm(take.tensor(f"{at}.input_layernorm.weight", e), config.norm_eps)
            mlp_norm = RMSNorm(take.tensor(f"{at}.post_attention_layernorm.weight", e), config.norm_eps)
            self.blocks.append(Block(attention_norm, attention, mlp_norm, mlp))
        self.norm = RMSNorm(take.tensor("model.norm.weight", e), config.norm_eps)
        self.head = self._head(take)
        take.finish()
        self.cos, self.sin = rope_table(config, config.max_context)  # [max_context, D/2]

    def _head(self, take: _Weights) -> Linear:
        if self.config.tied_embeddings:
            take.used.add("lm_head.weight")  # some files carry the tied head again
            return Linear(self.embedding, take.storage)
        return take.linear(self.config.width, {"lm_head.weight": self.config.vocab_size})

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """One step: reads and writes the pool, returns logits [S, vocab] of the batch's sample rows."""
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]  # [N, D/2]
        x = self.embedding[batch.tokens].float()  # [M, E]
        for block in self.blocks:
            x = block(x, batch, pool, cos, sin)
        return self.head(self.norm(x[batch.sample_rows]))  # [S, vocab]

    def linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down)
        yield self.head

    def safe_rows(self, max_rows: int) -> tuple[int, ...]:
        """Row counts to which a step is padded so that a row's bits never depend on its neighbours."""
        with torch.inference_mode():
            return find_safe_rows(self.linears(), max_rows)


class _Weights:
    """Hands out each tensor once, with its shape checked; `finish` names what nobody asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], storage: Storage) -> None:
        self.tensors = tensors
        self.storage = storage
        self.used: set[str] = set()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.tensors:
            raise WeightError(f"tensor {name!r} is missing")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightError(f"tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
        self.used.add(name)
        return tensor

    def linear(self, columns: int, parts: Mapping[str, int]) -> Linear:
        """Several weights [rows, columns] stacked into one product."""
        stacked = [self.tensor(name, rows, columns) for name, rows in parts.items()]
        return Linear(torch.cat(stacked) if len(stacked) > 1 else stacked[0], self.storage)

    def finish(self) -> None:
        left = sorted(set(self.tensors) - self.used)
        if left:
            raise WeightError(f"{len(left)} tensors are not used by this model: {', '.join(left[:5])}")
