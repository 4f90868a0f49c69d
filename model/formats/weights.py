"""The tensors of a checkpoint of any format under the decoder's names. Each is read when it is asked for."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from tokenteller.model.config import ModelConfig
from tokenteller.model.formats.blocks import BlockMatrix
from tokenteller.model.formats.errors import CheckpointError, naming
from tokenteller.model.formats.gguf import GGUFModel
from tokenteller.model.formats.gguf_config import hf_config
from tokenteller.model.formats.hf_config import read_hf_config
from tokenteller.model.formats.keys import read_json
from tokenteller.model.formats.names import TensorNames, gguf_names, safetensors_names
from tokenteller.model.formats.safetensors import SafetensorsFiles
from tokenteller.model.kv_memory import size
from tokenteller.model.packing import Matrix

_TRIM_BYTES = 32 * 2**20  # bytes read between two attempts to release memory


def release_heap() -> None:
    """Returns freed memory to the system; glibc keeps it otherwise."""
    with suppress(OSError, AttributeError):  # only glibc has this call
        ctypes.CDLL(None).malloc_trim(0)


class Progress:
    """Reports how far loading has come: a line that updates on a terminal, else one line per quarter.

    Says nothing for the first `quiet_s` seconds, in which small models are loaded.
    """

    def __init__(self, out: TextIO, quiet_s: float = 1.0) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._from = time.monotonic() + quiet_s
        self._next = 0.0

    def __call__(self, done: int, total: int, read_bytes: int) -> None:
        """`done` of `total` tensors have been read, `read_bytes` in all."""
        if time.monotonic() < self._from:
            return
        line = f"loading weights: {done}/{total} tensors, {size(read_bytes)}"
        if self._is_terminal:
            print(f"\r{line}", end="\n" if done == total else "", file=self._out, flush=True)
        elif done / total >= self._next or done == total:
            self._next = done / total + 0.25
            print(line, file=self._out, flush=True)


class GGUFTensors(Mapping[str, Matrix]):
    """The tensors of a GGUF model: quantised matrices in their blocks, everything else as torch tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.model = naming(path, lambda: GGUFModel(path))
        self.drop_pages = self.model.drop_pages

    def path_of(self, name: str) -> Path:
        return self._path

    def __getitem__(self, name: str) -> Matrix:
        return naming(self._path, lambda: self._read(name))

    def _read(self, name: str) -> Matrix:
        info, stored = self.model[name], self.model.read(name)
        if not isinstance(stored, BlockMatrix):
            return torch.from_numpy(stored)
        if info.kind.name == "BF16":
            return torch.from_numpy(stored.bytes).view(torch.bfloat16).reshape(info.shape)
        return stored if len(info.shape) == 2 else torch.from_numpy(stored.decode().reshape(info.shape))

    def __contains__(self, name: object) -> bool:
        return name in self.model

    def __iter__(self) -> Iterator[str]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)


class Weights(Mapping[str, Matrix]):
    """The tensors of a checkpoint under the decoder's names."""

    def __init__(self, tensors: SafetensorsFiles | GGUFTensors, names: TensorNames, progress: Progress | None) -> None:
        self._tensors = tensors
        self._names = names
        self._sources = names.sources(tensors)
        self._progress = progress
        self._read: set[str] = set()
        self._bytes = 0

    def error(self, name: str, problem: str) -> CheckpointError:
        """What is wrong with a tensor, with the file and the file's own name for it."""
        theirs = self._sources[name].tensor if name in self._sources else self._names.spell(name)
        return CheckpointError(f"{self._tensors.path_of(theirs)}: tensor {theirs!r} {problem}")

    def __getitem__(self, name: str) -> Matrix:
        source = self._sources[name]
        tensor = source.take(self._tensors[source.tensor])
        self._read.add(name)
        if (self._bytes + tensor.nbytes) // _TRIM_BYTES > self._bytes // _TRIM_BYTES:
            release_heap()
            self._tensors.drop_pages()
        self._bytes += tensor.nbytes
        if self._progress:
            self._progress(len(self._read), len(self._sources), self._bytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def open_weights(path: Path, progress: Progress | None) -> tuple[ModelConfig, Weights, dict[str, Any]]:
    """The config, the weights and the file's own metadata, of a directory or a GGUF file. Raises CheckpointError."""
    if path.is_file():
        tensors = GGUFTensors(path)
        metadata = tensors.model.metadata
        config = naming(path, lambda: read_hf_config(hf_config(metadata, tensors)))
        return config, Weights(tensors, gguf_names(metadata["general.architecture"], config), progress), metadata
    raw = read_json(path / "config.json")
    config = naming(path / "config.json", lambda: read_hf_config(raw))
    return config, Weights(SafetensorsFiles(path), safetensors_names(raw["model_type"]), progress), raw
