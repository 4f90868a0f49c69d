"""ModelConfig: the numbers and choices that define a decoder's shape and maths. Knows no file format, needs no torch.

One decoder computes every family; a family is a set of values here. `formats/` reads them from files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenteller.model.formats.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Storage = Literal["fp32", "fp16", "bf16", "int8", "int4"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings (Su et al. 2021), and how their wavelengths are stretched past the trained context.

    linear: all by `factor` (Chen et al. 2023). llama3: only long ones (Llama 3.1). yarn: only long ones with another
    transition between long and short, and cos and sin scaled by `attention_factor` (Peng et al. 2023).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # the trained context; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ConfigError(f"RoPE base 'rope_theta' is {self.theta}; it must be above 1")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"RoPE 'factor' is {self.factor}; it must be above 0")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ConfigError(f"RoPE 'original_max_position_embeddings' is {self.original_context}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"RoPE 'low_freq_factor' is {self.low_freq_factor}; it must be above 0 and below 'high_freq_factor', "
                f"which is {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A pre-norm decoder with causal, optionally windowed, grouped-query attention."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True  # down(act(gate) * up); else down(act(up))
    rope: Rope | None = Rope()  # None: learned absolute positions
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    windows: tuple[int | None, ...] = ()  # per layer, in rows including the query's own; empty: all layers full
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads ('num_attention_heads') cannot share {self.num_kv_heads} kv heads "
                "('num_key_value_heads') evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"'head_dim' is {self.head_dim}, which is odd; RoPE rotates pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"'layer_types' has {len(self.windows)} entries for {self.num_layers} layers")

    @property
    def group(self) -> int:
        """Query heads per kv head: 1 is multi-head, num_heads is multi-query attention."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """How many rows a query of this layer sees, including its own; None: all of them."""
        return self.windows[layer] if self.windows else None

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head and embedding count once."""
        products = sum(count * rows * columns for rows, columns, count in self._products())
        return products + self._embedded() + self._vectors()

    def weight_bytes(self, storage: Storage) -> int:
        """Bytes of the weights in memory: matrices in `storage`, norms and biases in fp32.

        int8 has an fp32 scale per 64 inputs; int4 an fp16 step and minimum per 32 inputs, and an int8 head. With
        either, an embedding that is not tied to the head is in fp16.
        """
        element = 4 if storage == "fp32" else 2
        matrices = self._embedded() * element
        *layers, head = self._products()
        products = [(shape, storage) for shape in layers] + [(head, "int8" if storage == "int4" else storage)]
        for (rows, columns, count), form in products:
            row_bytes = columns * element
            if form == "int8":
                row_bytes = columns + 4 * -(-columns // 64)
            elif form == "int4":
                row_bytes = 20 * -(-columns // 32)
            matrices += count * rows * row_bytes
        return matrices + 4 * self._vectors()

    def _products(self) -> tuple[tuple[int, int, int], ...]:
        """(rows, columns, count) of each kind of matrix: qkv, attention output, gate and up, down; last the head."""
        e, h, k, d, m = self.width, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_width
        shapes = ((h + 2 * k) * d, e), (e, h * d), ((2 if self.gated_mlp else 1) * m, e), (e, m)
        layers = tuple((rows, columns, self.num_layers) for rows, columns in shapes)
        return *layers, (self.vocab_size, e, 1)

    def _embedded(self) -> int:
        """Parameters of the token embedding, unless tied to the head, and of learned positions."""
        tokens = 0 if self.tied_embeddings else self.vocab_size
        return (tokens + (0 if self.rope else self.max_context)) * self.width

    def _vectors(self) -> int:
        """Parameters of norms and biases."""
        e, h, k, d, m = self.width, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_width
        norm = e * (2 if self.norm == "layer" else 1)
        biases = self.qkv_bias * (h + 2 * k) * d + self.out_bias * e
        biases += self.mlp_bias * ((2 if self.gated_mlp else 1) * m + e)
        return self.num_layers * (2 * norm + biases + self.qk_norm * 2 * d) + norm
