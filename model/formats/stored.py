"""What a model's own file stores its numbers as, and what they are served as by default."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

from tokenteller.model.config import TOY, Storage, locate
from tokenteller.model.keys import ConfigError, Keys, json_object

KVFormat = Literal["fp32", "fp16"]


class Stored(NamedTuple):
    """`weights`: the format that loses nothing or, where there is none, the nearest. `remark`: why, in a few words."""

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
# types of GGUF tensors -> weight format; of the others, those of 5 bits and more become int8, the rest int4
_EXACT: dict[str, Storage] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "Q4_0": "int4", "Q4_1": "int4"}
_INT8 = frozenset({"Q8_0", "Q8_1", "Q8_K", "Q6_K", "Q5_0", "Q5_1", "Q5_K"})


def stored_format(model: str) -> Stored:
    """What `--weights auto` means for a model, from its config.json or GGUF header. Raises ConfigError."""
    path = locate(model, weights=False)
    path = path / "config.json" if path.is_dir() else path
    try:
        stored = _of_gguf(path) if path.suffix == ".gguf" else _of_config(json_object(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    # the toy's published texts were made with K and V in fp32
    return stored._replace(kv_dtype="fp32") if path.parent == TOY else stored


def _of_config(raw: dict[str, object]) -> Stored:
    keys = Keys(raw)
    dtype = keys.text("dtype") or keys.text("torch_dtype")
    if dtype is None:
        return Stored("fp32", "config.json names no dtype", "fp32")
    weights = _DTYPES.get(dtype.removeprefix("torch."), "fp16")
    remark = f"as stored, {dtype}" if dtype in ("float32", "float16", "bfloat16") else f"nearest to {dtype}"
    return Stored(weights, remark, "fp32" if weights == "fp32" else "fp16")


def _of_gguf(path: Path) -> Stored:
    from tokenteller.model.gguf import GGUFFile

    numbers: Counter[str] = Counter()
    for tensor in GGUFFile(path).tensors.values():
        numbers[tensor.kind.name] += math.prod(tensor.shape)
    if not numbers:
        raise ConfigError("it has no tensors")
    kind = numbers.most_common(1)[0][0]
    weights = _EXACT.get(kind, "int8" if kind in _INT8 else "int4")
    remark = f"as stored, {kind}" if kind in _EXACT else f"nearest to {kind}"
    return Stored(weights, remark, "fp32" if kind == "F32" else "fp16")
