"""What a model is and how its numbers are stored, from its config.json or GGUF header alone. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.formats.blocks import NUMBERS, TYPES
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.gguf import GGUFModel
from tokenteller.model.formats.gguf_config import hf_config
from tokenteller.model.formats.hf_config import read_hf_config
from tokenteller.model.formats.hub import TOY, locate
from tokenteller.model.formats.keys import Keys, json_object

KVFormat = Literal["fp32", "fp16"]


class Stored(NamedTuple):
    """`weights`: the format that loses nothing or, if there is none, the nearest. `remark`: why, in a few words."""

    weights: Storage
    remark: str
    kv_dtype: KVFormat  # fp16 where the model's own numbers have 16 bits or fewer


# dtypes of config.json -> weight format
_DTYPES: dict[str, Storage] = {
    "float64": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp16",
    "float8_e5m2": "fp16",
}


def read_config(model: str) -> ModelConfig:
    """The config of whatever `--model` names. Raises ConfigError naming the file and the key."""
    return _describe(model)[0]


def stored_format(model: str) -> Stored:
    """What `--weights auto` and the default K/V type mean for a model. Raises ConfigError."""
    return _describe(model)[1]


def _describe(model: str) -> tuple[ModelConfig, Stored]:
    path = locate(model, weights=False)
    path = path / "config.json" if path.is_dir() else path
    try:
        return _describe_file(path, path.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


@lru_cache(maxsize=1)
def _describe_file(path: Path, _changed: int) -> tuple[ModelConfig, Stored]:
    """Remembers the last file, since a plan asks for config and format, and a GGUF header has a whole vocabulary."""
    if path.suffix == ".gguf":
        model = GGUFModel(path)
        return read_hf_config(hf_config(model.metadata, model)), _of_tensors(model)
    raw = json_object(path.read_bytes())
    stored = _of_dtype(Keys(raw))
    # the toy's texts in tests and documentation were made with K and V in fp32
    return read_hf_config(raw), stored._replace(kv_dtype="fp32") if path.parent == TOY else stored


def _of_dtype(keys: Keys) -> Stored:
    dtype = keys.text("dtype") or keys.text("torch_dtype")
    if dtype is None:
        return Stored("fp32", "config.json names no dtype", "fp32")
    weights = _DTYPES.get(dtype, "fp16")
    exact = dtype in ("float32", "float16", "bfloat16")
    return Stored(weights, f"as stored, {dtype}" if exact else f"nearest to {dtype}", _kv_dtype(weights))


def _of_tensors(model: GGUFModel) -> Stored:
    numbers: Counter[str] = Counter()
    for tensor in model.values():
        if len(tensor.shape) > 1:
            numbers[tensor.kind.name] += math.prod(tensor.shape)
    if not numbers:
        raise ConfigError("it has no matrices")
    first, *others = (name for name, _ in numbers.most_common())
    kind = TYPES[NUMBERS[first]]
    if not kind.exact:
        return Stored(kind.nearest, f"nearest to {', '.join((first, *others))}", _kv_dtype(kind.nearest))
    rounded = f"; {', '.join(others)} rounded" if others else ""
    return Stored(kind.nearest, f"as stored, {first}{rounded}", _kv_dtype(kind.nearest))


def _kv_dtype(weights: Storage) -> KVFormat:
    return "fp32" if weights == "fp32" else "fp16"
