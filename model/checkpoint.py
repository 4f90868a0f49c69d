"""Loads a model by name: config, decoder and tokenizer."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.decoder import Decoder
from tokenteller.model.formats.errors import CheckpointError, ConfigError, naming
from tokenteller.model.formats.gguf_tokenizer import read_tokenizer
from tokenteller.model.formats.hf_tokenizer import build_tokenizer, checked_template, load_tokenizer
from tokenteller.model.formats.hub import locate
from tokenteller.model.formats.weights import Progress, open_weights, release_heap
from tokenteller.model.linear import StorageError, check_storage
from tokenteller.model.parts import WeightError
from tokenteller.model.tokenizer import Tokenizer

__all__ = ["Checkpoint", "CheckpointError", "Progress", "load", "release_memory"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


def load(
    model: str, storage: Storage, device: str = "cpu", max_context: int | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Loads what `--model` names. Positions from `max_context` on will not be used. Raises CheckpointError."""
    try:
        check_storage(storage, device)
        path = locate(model)
    except (ConfigError, StorageError) as error:
        raise CheckpointError(str(error)) from error
    config, weights, metadata = open_weights(path, progress)
    tokenizer = load_tokenizer(path, config) if path.is_dir() else _gguf_tokenizer(path, metadata, config)
    try:
        decoder = Decoder(config, weights, storage, device, max_context)
    except WeightError as error:
        raise weights.error(error.tensor, error.problem) from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    release_heap()
    return Checkpoint(_name(model, path), config, decoder, tokenizer)


def _name(model: str, path: Path) -> str:
    """The model's default name for clients: a path by its last part, anything else as it was asked for."""
    last = Path(os.path.abspath(path))  # '.' has no last part
    return (last.stem if path.is_file() else last.name) if Path(model).exists() else model


def _gguf_tokenizer(path: Path, metadata: Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    found = naming(path, lambda: read_tokenizer(metadata))
    template = checked_template(path, found.chat_template)
    return build_tokenizer(path, found.backend, config, found.bos, found.ends, template, found.names)


def release_memory() -> None:
    """Returns to the system what only loading needed: freed memory, and the pages of library code.

    Little of that code is used again, and the system reads it back from the files when it is.
    """
    release_heap()
    with suppress(OSError, AttributeError):  # only Linux has these files and calls
        libc = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, _, _, _, *file = line.split(maxsplit=5)
            if access == "r-xp" and file and file[0].startswith("/"):  # never written to, so nothing can be lost
                first, end = (int(at, 16) for at in place.split("-"))
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
