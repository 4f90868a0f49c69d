"""The decoder: embedding, pre-norm blocks of attention and MLP, head. No state of its own.

The blocks here say in tensors what is computed, and compute it on a GPU; on the CPU the same is one
call of `kernels.forward`.

One class for every family: what differs between Llama, Mistral, Qwen and GPT-2 is in ModelConfig.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tokenteller.model import kernels
from tokenteller.model.attention import Attention, Batch, RopeTable
from tokenteller.model.config import Activation, ModelConfig, Storage
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear, find_safe_rows
from tokenteller.model.packing import DTYPES, Matrix, as_tensor, is_exact

log = logging.getLogger("tokenteller.model")

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

_MOST_POSITIONS = 2**24


class WeightError(ValueError):
    """Weights that do not fit the config. `tensor` is the name it was asked for by; the message begins with it."""

    def __init__(self, tensor: str, problem: str) -> None:
        super().__init__(f"tensor {tensor!r} {problem}")
        self.tensor = tensor
        self.problem = problem


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
        self.activate = _ACTIVATIONS[config.activation]
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
        take = _Weights(config, weights, storage, device)
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
            self._model = self._compiled_model()
            self._layers = self._compiled_layers()
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

    def _compiled_model(self) -> kernels.Model:
        c = self.config
        return kernels.Model(
            c.num_layers,
            c.num_heads,
            c.num_kv_heads,
            kernels.ACTIVATIONS[c.activation],
            c.gated_mlp,
            c.vocab_size,
            np.float32(c.norm_eps),
            *_vectors(self.norm),
            _panels(self.head),
        )

    def _compiled_layers(self) -> kernels.Layer:
        """The weights of all blocks, those of a kind in one array; the blocks keep views of them."""
        qkv, out, up, down = (_stacked(kind) for kind in zip(*map(_linears, self.blocks), strict=True))
        attention, attention_bias = _stacked_norms([block.attention_norm for block in self.blocks])
        q, _ = _stacked_norms([block.attention.q_norm for block in self.blocks])
        k, _ = _stacked_norms([block.attention.k_norm for block in self.blocks])
        mlp, mlp_bias = _stacked_norms([block.mlp_norm for block in self.blocks])
        windows = np.array([block.attention.window for block in self.blocks])
        return kernels.Layer(attention, attention_bias, qkv, q, k, out, mlp, mlp_bias, up, down, windows)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What K and V are kept in if nothing else is asked for: fp32 on the CPU, on a GPU as the weights."""
        return torch.float32 if self.device.type == "cpu" else DTYPES[self.storage]

    def linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from _linears(block)
        yield self.head

    def safe_rows(self, max_rows: int) -> tuple[int, ...]:
        """Row counts to which a step is padded so that a row's bits never depend on its neighbours; empty: any."""
        if self.device.type == "cpu":
            return ()
        with torch.inference_mode():
            return find_safe_rows(self.linears(), max_rows)


def _vectors(norm: Callable[[torch.Tensor], torch.Tensor] | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A norm's weight and bias as arrays, empty where there is none."""
    parts = (getattr(norm, "weight", None), getattr(norm, "bias", None))
    weight, bias = (np.empty(0, np.float32) if part is None else part.numpy() for part in parts)
    return weight, bias


def _stacked_norms(
    norms: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights [layers, E] and biases of norms of a kind, of which the norms keep their part."""
    weights, biases = (np.stack(parts) for parts in zip(*map(_vectors, norms), strict=True))
    for norm, weight, bias in zip(norms, weights, biases, strict=True):
        if isinstance(norm, RMSNorm | LayerNorm):
            norm.weight = torch.from_numpy(weight)
        if isinstance(norm, LayerNorm):
            norm.bias = torch.from_numpy(bias)
    return weights, biases


def _linears(block: Block) -> tuple[Linear, Linear, Linear, Linear]:
    return block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down


def _panels(linear: Linear) -> kernels.Panels:
    assert linear.panels is not None
    return linear.panels


def _stacked(linears: Sequence[Linear]) -> kernels.Panels:
    """The panels of products of one shape as one array each, of which the products keep their part."""
    stacked = kernels.Panels(*map(np.stack, zip(*map(_panels, linears), strict=True)))
    for at, linear in enumerate(linears):
        linear.panels = kernels.Panels(*(part[at] for part in stacked))
    return stacked


class _Weights:
    """Hands out each tensor once, with its shape checked, as the parts of a decoder."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix], storage: Storage, device: str) -> None:
        self.config = config
        self.tensors = tensors
        self.storage = storage
        self.device = device
        self.used: set[str] = set()

    def matrix(self, name: str, *shape: int, storage: Storage | None = None) -> Matrix:
        """As the file has it, perhaps quantised, once its numbers are known to fit what it is stored in."""
        storage = storage or self.storage
        if name not in self.tensors:
            raise WeightError(name, "is missing")
        matrix = self.tensors[name]
        if tuple(matrix.shape) != shape:
            raise WeightError(name, f"has shape {list(matrix.shape)}; the config asks for {list(shape)}")
        self.used.add(name)
        if is_exact(matrix, storage) or (storage == "int8" and isinstance(matrix, BlockMatrix)):
            return matrix
        tensor = as_tensor(matrix)
        if not tensor.dtype.is_floating_point:
            raise WeightError(name, f"holds {tensor.dtype}; weights are floating-point numbers")
        if tensor.itemsize == 1:
            tensor = tensor.float()  # torch moves fp8 about and does no sums in it
        if storage in ("fp16", "int8", "int4") and tensor.ndim > 1 and tensor.dtype != torch.float16:
            least, most = (float(value) for value in torch.aminmax(tensor))
            if max(-least, most) > torch.finfo(torch.float16).max:
                raise WeightError(name, f"holds {max(-least, most):g}, beyond fp16's 65,504; use --weights fp32")
        return tensor

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Not for products, so int8 and int4 keep it in fp16."""
        return as_tensor(self.matrix(name, *shape, storage="fp16" if "int" in self.storage else self.storage))

    def table(self, name: str, *shape: int) -> torch.Tensor:
        """A copy as stored, in memory of our own."""
        return self.tensor(name, *shape).to(self.device, DTYPES[self.storage], copy=True)

    def optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.tensor(name, *shape) if name in self.tensors else None

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight or a bias, in fp32."""
        return self.tensor(name, size).to(self.device, torch.float32, copy=True)

    def norm(self, name: str, size: int) -> Norm:
        weight = self.vector(f"{name}.weight", size)
        if self.config.norm == "rms":
            return RMSNorm(weight, self.config.norm_eps)
        return LayerNorm(weight, self.vector(f"{name}.bias", size), self.config.norm_eps)

    def linear(self, columns: int, parts: Mapping[str, int], bias: bool) -> Linear:
        """Several weights [rows, columns] and their biases [rows] stacked into one product."""
        weights = [self.matrix(f"{name}.weight", rows, columns) for name, rows in parts.items()]
        biases = [self.vector(f"{name}.bias", rows) for name, rows in parts.items()] if bias else []
        return Linear(weights, self.storage, torch.cat(biases) if biases else None, self.device)

    def ends(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], Linear]:
        """The embedding, ids [M] -> [M, E], and the output head; tied, they are one matrix.

        A file may carry a tied head again; if it is another matrix, the file is believed.
        """
        first, last = "model.embed_tokens.weight", "lm_head.weight"
        shape = (self.config.vocab_size, self.config.width)
        storage: Storage = "int8" if self.storage == "int4" else self.storage
        tied = self.config.tied_embeddings
        if tied and last not in self.tensors:
            head = Linear(self.matrix(first, *shape, storage=storage), storage, None, self.device)
            return head.rows, head
        embedding, own = self.tensor(first, *shape), self.tensor(last, *shape)
        if tied and torch.equal(own, embedding):
            head = Linear(embedding, storage, None, self.device)
            return head.rows, head
        if tied:
            log.warning("tensor %r differs from the embedding that the config ties it to; it is used", last)
        table = Embedding(embedding.to(self.device, DTYPES[self.storage], copy=True))
        return table, Linear(own, storage, None, self.device)

    def block(self, layer: int) -> Block:
        c, at = self.config, f"model.layers.{layer}"
        e, d, h, k, m = c.width, c.head_dim, c.num_heads, c.num_kv_heads, c.mlp_width
        heads = {f"{at}.self_attn.q_proj": h * d, f"{at}.self_attn.k_proj": k * d, f"{at}.self_attn.v_proj": k * d}
        attention = Attention(
            c,
            layer,
            self.linear(e, heads, c.qkv_bias),
            self.linear(h * d, {f"{at}.self_attn.o_proj": e}, c.out_bias),
            RMSNorm(self.vector(f"{at}.self_attn.q_norm.weight", d), c.norm_eps) if c.qk_norm else None,
            RMSNorm(self.vector(f"{at}.self_attn.k_norm.weight", d), c.norm_eps) if c.qk_norm else None,
        )
        ups = {f"{at}.mlp.gate_proj": m} if c.gated_mlp else {}
        mlp = MLP(
            c,
            self.linear(e, ups | {f"{at}.mlp.up_proj": m}, c.mlp_bias),
            self.linear(m, {f"{at}.mlp.down_proj": e}, c.mlp_bias),
        )
        return Block(
            self.norm(f"{at}.input_layernorm", e), attention, self.norm(f"{at}.post_attention_layernorm", e), mlp
        )

    def finish(self) -> None:
        left = sorted(set(self.tensors) - self.used)
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise WeightError(left[0], f"is not used by this model{more}")
