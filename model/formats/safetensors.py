"""The tensors of a directory of safetensors files: one file, or shards named by an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tokenteller.model.formats.errors import CheckpointError, naming
from tokenteller.model.formats.keys import read_json


class SafetensorsFiles(Mapping[str, torch.Tensor]):
    """Each tensor is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError."""
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
        """The file that holds a tensor or, if there is none, that should name it."""
        return self._where[name][0] if name in self._where else self._default

    def drop_pages(self) -> None:
        """Nothing to do: safetensors keeps no pages of what it has read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        path, handle = self._where[name]
        tensor: torch.Tensor = naming(path, lambda: handle.get_tensor(name))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._where  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _open(path: Path) -> Any:
    return naming(path, lambda: safe_open(path, framework="pt"))


def _sharded(index: Path) -> dict[str, tuple[Path, Any]]:
    """Every tensor's shard. Index and shards must name the same tensors."""
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise CheckpointError(f"{index}: 'weight_map' is missing, or does not map tensors to files")
    where: dict[str, tuple[Path, Any]] = {}
    for shard in sorted(set(shard_of.values())):
        path, expected = index.parent / shard, {name for name, file in shard_of.items() if file == shard}
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
