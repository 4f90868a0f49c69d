"""ModelConfig: the numbers that decide a decoder's shape and maths. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOY = Path(__file__).parent / "toy"


class ConfigError(ValueError):
    """A config.json that cannot be honoured; the message names the key."""


# Keys that must have one of these values, because the decoder computes nothing else.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder in Llama form: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")

    @property
    def group(self) -> int:
        """Query heads that share one kv head: 1 is multi-head, num_heads is multi-query attention."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, the head counted once when it is tied to the embedding."""
        attention = self.width * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.width * self.mlp_width + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.width

    def weight_bytes(self, bytes_per_weight: int) -> int:
        """Bytes the weights take as served. A tied head is stored once in fp32, and again in its packed fp16 form."""
        again = self.vocab_size * self.width if self.tied_embeddings and bytes_per_weight < 4 else 0
        return (self.num_parameters + again) * bytes_per_weight

    @classmethod
    def read(cls, model: str) -> ModelConfig:
        """From the config.json of 'toy' or of a directory. Raises ConfigError naming the file."""
        path = locate(model) / "config.json"
        try:
            return cls.from_hf(dict(json.loads(path.read_text())))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json. Raises ConfigError for what would change the maths and is not computed."""
        for key, allowed in _FIXED.items():
            if key in raw and raw[key] is not None and raw[key] not in allowed:
                raise ConfigError(f"config key {key!r} is {raw[key]!r}; supported: {', '.join(map(repr, allowed))}")
        for key in _REQUIRED:
            if not isinstance(raw.get(key), int):
                raise ConfigError(f"config key {key!r} is missing or not an integer")
        heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            width=raw["hidden_size"],
            mlp_width=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_context=raw.get("max_position_embeddings") or 2048,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )


def _rope_theta(raw: dict[str, Any]) -> float:
    """The RoPE base; older configs name it `rope_theta`, newer ones put it in `rope_parameters`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"RoPE type {kind!r} is not supported; supported: 'default'")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def locate(model: str) -> Path:
    """The directory that `--model` names: 'toy' or a path."""
    path = TOY if model == "toy" else Path(model)
    if not path.is_dir():
        raise ConfigError(f"model {model!r} is neither 'toy' nor a directory")
    return path
