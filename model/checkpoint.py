"""A checkpoint directory or GGUF file -> config, weights, tokenizer. What is missing or odd is named in a CheckpointError."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import tokenizers
import torch
from safetensors import safe_open

from model.config import ConfigError, ModelConfig, locate
from model.decoder import Decoder, WeightError
from model.gguf import GGUFFile, read_tokenizer
from model.kv_memory import size
from model.linear import Storage, StorageError, check_storage
from model.tokenizer import Tokenizer

T = TypeVar("T")
Part = Callable[[torch.Tensor], torch.Tensor]


class CheckpointError(ValueError):
    """A model that cannot be loaded; one line that names the file and what is amiss in it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model and how it turns text into ids."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


def load(
    model: str, storage: Storage, device: str = "cpu", max_context: int | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Everything of one model. `max_context`: no position beyond it will come. Raises CheckpointError."""
    try:
        check_storage(storage, device)
        config, path = ModelConfig.read(model), locate(model)
    except (ConfigError, StorageError) as error:
        raise CheckpointError(str(error)) from error
    files: SafetensorsFiles | GGUFTensors
    if path.is_dir():
        files = SafetensorsFiles(path)
        names = gpt2_names(files) if _json(path / "config.json")["model_type"] == "gpt2" else llama_names(files)
    else:
        files = GGUFTensors(path)
        names = gguf_names(files, config)
    tokenizer = load_tokenizer(path, config) if path.is_dir() else files.tokenizer()
    weights = Renamed(files, names, progress)
    try:
        decoder = Decoder(config, weights, storage, device, max_context)
    except WeightError as error:
        name = weights.own_name(error.tensor)
        raise CheckpointError(f"{files.path_of(name)}: tensor {name!r} {error.problem}") from error
    return Checkpoint(_name(model, path), config, decoder, tokenizer)


def _name(model: str, path: Path) -> str:
    """What the model is called to clients, if not told otherwise: as it was asked for, a path by its last part."""
    return (path.stem if path.is_file() else path.name) if Path(model).exists() else model


class Progress:
    """Tells how far loading has come: a line that moves on a terminal, else a line each quarter."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._moves = out.isatty()
        self._next = 0.0

    def __call__(self, done: int, total: int, read_bytes: int) -> None:
        """`done` of `total` tensors have been read, `read_bytes` in all as they came out of the file."""
        share = done / total
        if self._moves:
            end = "\n" if done == total else ""
            print(f"\rloading weights: {done}/{total} tensors, {size(read_bytes)}", end=end, file=self._out, flush=True)
        elif share >= self._next or done == total:
            self._next = share + 0.25
            print(f"loading weights: {done}/{total} tensors, {size(read_bytes)}", file=self._out, flush=True)


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
        tensor: torch.Tensor = _named(path, lambda: handle.get_tensor(name))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _open(path: Path) -> Any:
    return _named(path, lambda: safe_open(path, framework="pt"))


def _sharded(index: Path) -> dict[str, tuple[Path, Any]]:
    """Every tensor's shard, after proving that index and shards name the same tensors."""
    said = _json(index).get("weight_map")
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
        self.file = _named(path, lambda: GGUFFile(path))

    def path_of(self, name: str) -> Path:
        return self._path

    def __getitem__(self, name: str) -> torch.Tensor:
        return _named(self._path, lambda: torch.from_numpy(self.file.read(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.tensors)

    def __len__(self) -> int:
        return len(self.file.tensors)


class Renamed(Mapping[str, torch.Tensor]):
    """The tensors of a file under the decoder's names. `names`: ours -> (the file's own, which part of it is ours)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Names, progress: Progress | None) -> None:
        self._tensors = tensors
        self._names = names
        self._progress = progress
        self._read: set[str] = set()
        self._bytes = 0

    def own_name(self, name: str) -> str:
        """The file's own name of a tensor, for messages."""
        return self._names[name][0] if name in self._names else name

    def __getitem__(self, name: str) -> torch.Tensor:
        own, part = self._names[name]
        tensor = self._tensors[own]
        if part:
            tensor = part(tensor)
        self._read.add(name)
        self._bytes += tensor.nbytes
        if self._progress:
            self._progress(len(self._read), len(self._names), self._bytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


Names = dict[str, tuple[str, Part | None]]
_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # derived values that older files carry


def llama_names(tensors: Mapping[str, torch.Tensor]) -> Names:
    """Llama, Mistral and Qwen files use the decoder's own names."""
    return {name: (name, None) for name in tensors if not _BUFFERS.search(name)}


_GPT2 = {
    "wte": "model.embed_tokens",
    "wpe": "model.embed_positions",
    "ln_f": "model.norm",
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_BLOCK = re.compile(r"h\.(\d+)\.(.+)")


def gpt2_names(tensors: Mapping[str, torch.Tensor]) -> Names:
    """GPT-2's names; its matrices are stored [in, out] (Conv1D), and q, k and v as one."""
    names: Names = {}
    for own in tensors:
        if _BUFFERS.search(own):
            continue
        module, _, kind = own.removeprefix("transformer.").rpartition(".")
        block = _BLOCK.fullmatch(module)
        at, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
        matrix = kind == "weight" and block and "ln_" not in module
        if module == "attn.c_attn":
            for part, letter in enumerate("qkv"):
                names[f"{at}self_attn.{letter}_proj.{kind}"] = (own, _column(part))
        else:
            names[f"{at}{_GPT2.get(module, module)}.{kind}"] = (own, torch.t if matrix else None)
    return names


def _column(part: int) -> Part:
    return lambda tensor: tensor.t().chunk(3)[part]  # [E, 3E] -> [E, E]; [3E] -> [E]


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
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_names(tensors: GGUFTensors, config: ModelConfig) -> Names:
    """GGUF's names. Files of the llama architecture hold q and k in the order of rotated pairs (0, 1), (2, 3), ..."""
    paired = tensors.file.metadata["general.architecture"] == "llama"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    names: Names = {}
    for own in tensors:
        module, _, kind = own.rpartition(".")
        block = _GGUF_BLOCK.fullmatch(module)
        at, module = (f"model.layers.{block[1]}.", block[2]) if block else ("", module)
        if module == "attn_qkv":
            for part, letter in enumerate("qkv"):
                names[f"{at}self_attn.{letter}_proj.{kind}"] = (own, _third(part))
        else:
            part = _halves(heads[module]) if paired and module in heads else None
            names[f"{at}{_GGUF.get(module, module)}.{kind}"] = (own, part)
    return names


def _third(part: int) -> Part:
    return lambda tensor: tensor.chunk(3)[part]  # [3E, E] -> [E, E]; [3E] -> [E]


def _halves(heads: int) -> Part:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + D/2)."""

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.unflatten(0, (heads, -1, 2))  # [heads, D/2, 2, ...]
        return pairs.transpose(1, 2).flatten(0, 2)  # [heads x D, ...]

    return reordered


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """tokenizer.json, with BOS, the stop ids and the chat template from the files beside it."""
    path = directory / "tokenizer.json"
    backend = _named(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
    if backend.get_vocab_size(with_added_tokens=True) > config.vocab_size:
        raise CheckpointError(
            f"{path}: {backend.get_vocab_size(with_added_tokens=True)} tokens, but the model has {config.vocab_size}"
        )
    settings = _json(directory / "tokenizer_config.json", optional=True)
    generation = _json(directory / "generation_config.json", optional=True)
    raw = _json(directory / "config.json")
    stops: set[int] = set()
    for source in (raw, generation):
        ids = source.get("eos_token_id")
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    eos = _special(settings.get("eos_token"), backend)
    if eos is not None:
        stops.add(eos)
    bos = _special(settings.get("bos_token"), backend) if _adds_bos(backend) else None
    return Tokenizer(backend, bos_id=bos, stop_ids=stops, chat_template=settings.get("chat_template"))


def _adds_bos(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer itself puts a special token in front of a text."""
    return len(backend.encode("a", add_special_tokens=True).ids) > len(
        backend.encode("a", add_special_tokens=False).ids
    )


def _special(token: Any, backend: tokenizers.Tokenizer) -> int | None:
    content = token.get("content") if isinstance(token, dict) else token
    return None if content is None else backend.token_to_id(content)


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    return _named(path, lambda: dict(json.loads(path.read_text())))


def _named(path: Path, read: Callable[[], T]) -> T:
    """Whatever goes wrong while reading `path` becomes one line that names it."""
    try:
        return read()
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise CheckpointError(f"{path}: {error}") from error
