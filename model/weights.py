"""The tensors of a checkpoint, whatever its form, under the decoder's names; each is read when it is asked for."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from safetensors import safe_open

from tokenteller.model.config import ModelConfig
from tokenteller.model.decoder import WeightError
from tokenteller.model.gguf import GGUFFile, hf_config
from tokenteller.model.keys import json_object
from tokenteller.model.kv_memory import size

T = TypeVar("T")
Part = Callable[[torch.Tensor], torch.Tensor]
Names = dict[str, tuple[str, Part | None]]


class CheckpointError(ValueError):
    """A model that cannot be loaded; one line that names the file and what is amiss in it."""


def named(path: Path, read: Callable[[], T]) -> T:
    """Whatever goes wrong while reading `path` becomes one line that names it."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception for a broken file, or panics
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from error


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    return {} if optional and not path.exists() else named(path, lambda: json_object(path.read_bytes()))


_TRIM_BYTES = 32 * 2**20  # read between two looks for memory that can be given back


def give_back_heap() -> None:
    """Returns freed memory to the system; the C library keeps it otherwise."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class Progress:
    """Tells how far loading has come: a line that moves on a terminal, else a line each quarter.

    Says nothing for the first `quiet_s` seconds: what is small is loaded by then.
    """

    def __init__(self, out: TextIO, quiet_s: float = 1.0) -> None:
        self._out = out
        self._moves = out.isatty()
        self._from = time.monotonic() + quiet_s
        self._next = 0.0

    def __call__(self, done: int, total: int, read_bytes: int) -> None:
        """`done` of `total` tensors have been read, `read_bytes` in all as they came out of the file."""
        if time.monotonic() < self._from:
            return
        said = f"loading weights: {done}/{total} tensors, {size(read_bytes)}"
        if self._moves:
            print(f"\r{said}", end="\n" if done == total else "", file=self._out, flush=True)
        elif done / total >= self._next or done == total:
            self._next = done / total + 0.25
            print(said, file=self._out, flush=True)


class SafetensorsFiles(Mapping[str, torch.Tensor]):
    """The tensors of a directory, in one file or in shards named by an index; each is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        self._default = single if single.exists() or not index.exists() else index
        if self._default == single:
            if not single.exists():
                raise CheckpointError(f"{single}: no such file; weights are read from safetensors or GGUF files only")
            handle = _open(single)
            self._where = dict.fromkeys(handle.keys(), (single, handle))
        else:
            self._where = _sharded(index)

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor, or where it would be named."""
        return self._where[name][0] if name in self._where else self._default

    def __getitem__(self, name: str) -> torch.Tensor:
        path, handle = self._where[name]
        tensor: torch.Tensor = named(path, lambda: handle.get_tensor(name))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._where  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _open(path: Path) -> Any:
    return named(path, lambda: safe_open(path, framework="pt"))


def _sharded(index: Path) -> dict[str, tuple[Path, Any]]:
    """Every tensor's shard, after proving that index and shards name the same tensors."""
    said = read_json(index).get("weight_map")
    if not isinstance(said, dict) or not all(isinstance(shard, str) for shard in said.values()):
        raise CheckpointError(f"{index}: 'weight_map' is missing, or does not map tensors to files")
    where: dict[str, tuple[Path, Any]] = {}
    for shard in sorted(set(said.values())):
        path, expected = index.parent / shard, {name for name, file in said.items() if file == shard}
        if path.parent != index.parent:
            raise CheckpointError(f"{index}: shard {shard!r} lies outside of the checkpoint")
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; the index expects {len(expected)} tensors in it")
        handle = _open(path)
        held = set(handle.keys())
        if held != expected:
            odd = min(held ^ expected)
            problem = "is in the index but not in this shard" if odd in expected else "is not in the index"
            raise CheckpointError(f"{path}: tensor {odd!r} {problem}")
        where |= dict.fromkeys(held, (path, handle))
    return where


class GGUFTensors(Mapping[str, torch.Tensor]):
    """The tensors of a GGUF file; each is read and decoded when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = named(path, lambda: GGUFFile(path))

    def path_of(self, name: str) -> Path:
        return self._path

    def __getitem__(self, name: str) -> torch.Tensor:
        return named(self._path, lambda: torch.from_numpy(self.file.read(name)))

    def __contains__(self, name: object) -> bool:
        return name in self.file.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.tensors)

    def __len__(self) -> int:
        return len(self.file.tensors)


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of a file under the decoder's names. `names`: ours -> (the file's own, which part of it is ours)."""

    def __init__(
        self, tensors: SafetensorsFiles | GGUFTensors, scheme: Scheme, names: Names, progress: Progress | None
    ) -> None:
        self._tensors = tensors
        self._scheme = scheme
        self._names = names
        self._progress = progress
        self._read: set[str] = set()
        self._bytes = 0

    def told(self, error: WeightError) -> CheckpointError:
        """The error with the file, and the tensor as the file spells it."""
        own = self._names[error.tensor][0] if error.tensor in self._names else self._scheme.spell(error.tensor)
        return CheckpointError(f"{self._tensors.path_of(own)}: tensor {own!r} {error.problem}")

    def __getitem__(self, name: str) -> torch.Tensor:
        own, part = self._names[name]
        tensor = self._tensors[own]
        if part:
            tensor = part(tensor)
        self._read.add(name)
        if (self._bytes + tensor.nbytes) // _TRIM_BYTES > self._bytes // _TRIM_BYTES:
            give_back_heap()
        self._bytes += tensor.nbytes
        if self._progress:
            self._progress(len(self._read), len(self._names), self._bytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # derived values that older files carry


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a kind of file spells the decoder's modules; those of block N stand behind `block` with N in it."""

    block: str
    modules: Mapping[str, str]  # the file's name -> ours
    fused: str = ""  # q, k and v in one

    def names(self, tensors: Iterable[str], part: Callable[[str, str, int], Part | None]) -> Names:
        """Of all tensors. part(module, kind, third) is what to take of one; an unknown module keeps its name."""
        names: Names = {}
        for own in tensors:
            if _BUFFERS.search(own):
                continue
            module, _, kind = own.removeprefix("transformer.").rpartition(".")
            block = re.fullmatch(self.block.format(r"(\d+)") + "(.+)", module)
            at, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
            ours = [f"self_attn.{letter}_proj" for letter in "qkv"] if module == self.fused else [self._ours(module)]
            for third, name in enumerate(ours):
                names[f"{at}{name}.{kind}"] = (own, part(module, kind, third))
        return names

    def _ours(self, module: str) -> str:
        return self.modules.get(module, module)

    def spell(self, name: str) -> str:
        """The file's name for one of ours."""
        module, _, kind = name.rpartition(".")
        block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        at, module = (self.block.format(block[1]), block[2]) if block else ("", module)
        if self.fused and re.fullmatch(r"self_attn\.[qkv]_proj", module):
            return f"{at}{self.fused}.{kind}"
        own = {ours: own for own, ours in self.modules.items()}
        return f"{at}{own.get(module, module)}.{kind}"


LLAMA = Scheme("model.layers.{}.", {})  # Llama, Mistral and Qwen files use the decoder's own names
GPT2 = Scheme(
    "h.{}.",
    {
        "wte": "model.embed_tokens",
        "wpe": "model.embed_positions",
        "ln_f": "model.norm",
        "ln_1": "input_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    fused="attn.c_attn",
)
_GGUF = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gpt2_part(module: str, kind: str, third: int) -> Part | None:
    """Matrices are stored [in, out] (Conv1D)."""
    if module == GPT2.fused:
        return lambda tensor: tensor.t().chunk(3)[third]  # [E, 3E] -> [E, E]; [3E] -> [E]
    return torch.t if "." in module and kind == "weight" else None


def _gguf_part(arch: str, config: ModelConfig) -> Callable[[str, str, int], Part | None]:
    """Files of the llama architecture hold the rows of q and k in rotated pairs (0, 1), (2, 3), ..."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if arch == "llama" else {}

    def part(module: str, kind: str, third: int) -> Part | None:
        if module == "attn_qkv":
            return lambda tensor: tensor.chunk(3)[third]  # [3E, E] -> [E, E]; [3E] -> [E]
        return _halves(heads[module]) if module in heads else None

    return part


def _halves(heads: int) -> Part:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + D/2)."""

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] % (2 * heads):
            return tensor  # of a wrong shape, as will be said
        pairs = tensor.unflatten(0, (heads, -1, 2))  # [heads, D/2, 2, ...]
        return pairs.transpose(1, 2).flatten(0, 2)  # [heads x D, ...]

    return reordered


def open_weights(path: Path, progress: Progress | None) -> tuple[ModelConfig, Weights, dict[str, Any]]:
    """The config, the weights (none read yet) and the file's own metadata, of a directory or a GGUF file."""
    if path.is_file():
        tensors = GGUFTensors(path)
        metadata = tensors.file.metadata
        config = named(path, lambda: ModelConfig.from_hf(hf_config(metadata, tensors)))
        arch = metadata["general.architecture"]
        scheme = Scheme("blk.{}.", _GGUF, "attn_qkv" if arch == "gpt2" else "")
        return config, Weights(tensors, scheme, scheme.names(tensors, _gguf_part(arch, config)), progress), metadata
    raw = read_json(path / "config.json")
    config = named(path / "config.json", lambda: ModelConfig.from_hf(raw))
    files, scheme = SafetensorsFiles(path), GPT2 if raw["model_type"] == "gpt2" else LLAMA
    part = _gpt2_part if scheme is GPT2 else lambda module, kind, third: None
    return config, Weights(files, scheme, scheme.names(files, part), progress), raw
