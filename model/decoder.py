"""The decoder: embedding, pre-norm blocks of attention and MLP, head. No state of its own.

`layers` says in tensors what is computed, and a GPU runs that; on the CPU a whole step is one call of
`kernels.forward`. One class for every family: what differs between Llama, Mistral, Qwen and GPT-2 is in ModelConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from tokenteller.model import kernels
from tokenteller.model.attention import Batch, RopeTable
from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear, find_safe_rows
from tokenteller.model.packing import DTYPES, Matrix
from tokenteller.model.parts import Parts
from tokenteller.model.stacked import compiled_model, stacked_layers

_MOST_POSITIONS = 2**24  # that fp32 counts


class Decoder:
    """Weights and the order in which they are applied."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix],
        storage: Storage = "fp32",
        device: str = "cpu",
        max_context: int | None = None,
    ) -> None:
        """weights: tensors under the names Llama has in Hugging Face files, read one at a time, all of them used.

        max_context: no position from there on will come (default: the model's own). Raises WeightError naming the
        tensor that is missing, too many, or of another shape than the config says, ConfigError for a context whose
        positions fp32 cannot count.
        """
        if (max_context or config.max_context) > _MOST_POSITIONS:
            raise ConfigError(
                f"a context of {max_context or config.max_context:,} tokens: fp32 counts positions to "
                f"{_MOST_POSITIONS:,} only; --max-context lowers it"
            )
        take = Parts(config, weights, storage, device)
        self.config = config
        self.storage = storage
        self.device = torch.device(device)
        self.embed, self.head = take.ends()
        self.positions: torch.Tensor | None = None
        if config.rope is None:
            self.positions = take.table("model.embed_positions.weight", config.max_context, config.width)
        factors = take.optional("rope_freqs.weight", config.head_dim // 2) if config.rope else None
        self.rope = RopeTable(config, factors, device)
        self.blocks = [take.block(layer) for layer in range(config.num_layers)]
        self.norm = take.norm("model.norm", config.width)
        take.finish()
        if device == "cpu":
            self._model = compiled_model(config, self.norm, self.head)
            self._layers = stacked_layers(self.blocks)
            self._step = kernels.forward_for(self._layers, self._model)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """One step: reads and writes the pool, returns logits [S, vocab] of the sample rows, in fp32 on the CPU."""
        return self._forward_in_torch(batch, pool) if pool.flat is None else self._forward_compiled(batch, pool)

    def _forward_in_torch(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """The step as plain tensor code, for a GPU."""
        batch = batch.to(self.device)
        x = self.embed(batch.tokens)  # [M, E]
        if self.positions is not None:
            x[: batch.positions.shape[0]] += self.positions[batch.positions].float()
        cos, sin = self.rope(batch.positions)  # [N, D/2] each
        for block in self.blocks:
            x = block(x, batch, pool, cos, sin)
        return self.head(self.norm(x[batch.sample_rows])).cpu()  # [S, vocab]

    def _forward_compiled(self, batch: Batch, pool: KVPool) -> torch.Tensor:
        """The same step in one call of compiled code, each row alone."""
        c, rows = self.config, len(batch.tokens)
        x = self.embed(batch.tokens)  # [N, E]
        if self.positions is not None:
            x += self.positions[batch.positions].float()
        rope = tuple(part.numpy() for part in self.rope(batch.positions))  # cos and sin, [N, D/2] each
        work = kernels.Workspace(
            np.empty((rows, c.width), np.float32),
            np.empty((rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim), np.float32),
            np.empty((rows, c.num_heads, c.head_dim), np.float32),
            np.empty((rows, (2 if c.gated_mlp else 1) * c.mlp_width), np.float32),
            np.empty((rows, c.mlp_width), np.float32),
        )
        scores = self._step(
            x.numpy(),
            self._layers,
            self._model,
            work,
            rope,
            pool.flat,
            pool.lane,
            batch.slots.numpy(),
            batch.positions.numpy(),
            batch.sample_rows.numpy(),
        )
        return torch.from_numpy(scores)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What K and V are kept in if nothing else is asked for: fp32 on the CPU, on a GPU as the weights."""
        return torch.float32 if self.device.type == "cpu" else DTYPES[self.storage]

    def linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from block.linears()
        yield self.head

    def safe_rows(self, max_rows: int) -> tuple[int, ...]:
        """Row counts to which a step is padded so that a row's bits never depend on its neighbours; empty: any."""
        if self.device.type == "cpu":
            return ()
        with torch.inference_mode():
            return find_safe_rows(self.linears(), max_rows)
