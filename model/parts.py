"""The parts of a decoder, made from a checkpoint's tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from tokenteller.model.attention import Attention
from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.layers import MLP, Block, Embedding, LayerNorm, Norm, RMSNorm
from tokenteller.model.linear import Linear
from tokenteller.model.packing import DTYPES, Matrix, as_tensor, is_exact

log = logging.getLogger("tokenteller.model")


class WeightError(ValueError):
    """Weights that do not fit the config. `tensor` is the name it was looked up by; the message begins with it."""

    def __init__(self, tensor: str, problem: str) -> None:
        super().__init__(f"tensor {tensor!r} {problem}")
        self.tensor = tensor
        self.problem = problem


class Parts:
    """Builds each part from its tensors, checks their shapes, and keeps track of which tensors are used."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix], storage: Storage, device: str) -> None:
        self.config = config
        self.tensors = tensors
        self.storage = storage
        self.device = device
        self.used: set[str] = set()

    def matrix(self, name: str, *shape: int, storage: Storage | None = None) -> Matrix:
        """As the file has it, perhaps quantised. Raises WeightError if its numbers do not fit the weight format."""
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
            tensor = tensor.float()  # torch cannot compute with fp8
        if storage in ("fp16", "int8", "int4") and tensor.ndim > 1 and tensor.dtype != torch.float16:
            least, most = (float(value) for value in torch.aminmax(tensor))
            if max(-least, most) > torch.finfo(torch.float16).max:
                raise WeightError(name, f"holds {max(-least, most):g}, beyond fp16's 65,504; use --weights fp32")
        return tensor

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Not multiplied by, so int8 and int4 keep it in fp16."""
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

        A file may have a tied head, too. If the two matrices differ, each is used for what it is named.
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
