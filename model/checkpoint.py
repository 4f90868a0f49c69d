"""A checkpoint directory or GGUF file -> config, decoder, tokenizer. What is missing or odd is named in an error."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tokenteller.model.chat import UnsafeTemplate, check
from tokenteller.model.config import ModelConfig, Storage, locate
from tokenteller.model.decoder import Decoder, WeightError
from tokenteller.model.gguf import read_tokenizer
from tokenteller.model.keys import ConfigError, Keys
from tokenteller.model.linear import StorageError, check_storage
from tokenteller.model.tokenizer import Tokenizer
from tokenteller.model.weights import CheckpointError, Progress, give_back_heap, named, open_weights, read_json

__all__ = ["Checkpoint", "CheckpointError", "Progress", "load"]


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
        path = locate(model)
    except (ConfigError, StorageError) as error:
        raise CheckpointError(str(error)) from error
    config, weights, metadata = open_weights(path, progress)
    tokenizer = load_tokenizer(path, config) if path.is_dir() else gguf_tokenizer(path, metadata, config)
    try:
        decoder = Decoder(config, weights, storage, device, max_context)
    except WeightError as error:
        raise weights.told(error) from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    give_back_heap()
    return Checkpoint(_name(model, path), config, decoder, tokenizer)


def _name(model: str, path: Path) -> str:
    """What the model is called to clients, if not told otherwise: as it was asked for, a path by its last part."""
    last = Path(os.path.abspath(path))  # '.' has no last part
    return (last.stem if path.is_file() else last.name) if Path(model).exists() else model


def give_back_memory() -> None:
    """Returns to the system what only loading needed: freed memory, which the C library keeps otherwise, and the pages
    of the libraries' code, of which few are used again; those come back from the files."""
    give_back_heap()
    with suppress(OSError, AttributeError):  # only Linux has these files and calls
        libc = ctypes.CDLL(None)
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, _, _, _, *file = line.split(maxsplit=5)
            if access == "r-xp" and file and file[0].startswith("/"):  # never written to, so nothing can be lost
                first, end = (int(at, 16) for at in place.split("-"))
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """tokenizer.json, with BOS, the stop ids and the chat template from the files beside it."""
    path = directory / "tokenizer.json"
    if not path.exists():
        others = ", ".join(
            name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (directory / name).exists()
        )
        remedy = f" ({others} alone cannot be read: AutoTokenizer.save_pretrained makes it of them)" if others else ""
        raise CheckpointError(f"{path}: no such file{remedy}")
    backend = named(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
    stops: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = read_json(directory / name, optional=True).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        for end in ids:
            if type(end) is not int or not 0 <= end < config.vocab_size:
                raise CheckpointError(f"{directory / name}: 'eos_token_id' has {end!r}, of {config.vocab_size} tokens")
        stops.update(ids)
    file = directory / "tokenizer_config.json"
    settings = Keys(read_json(file, optional=True))
    names = named(file, lambda: _names(settings))
    eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if eos is not None:
        stops.add(eos)
    bos = named(path, lambda: _bos(backend))
    return _tokenizer(path, backend, config, bos, stops, _chat_template(directory, settings), names)


def _names(settings: Keys) -> dict[str, str]:
    """The special tokens by what chat templates call them; one may stand there with its properties."""
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        said = settings.get(name)
        text = Keys(said, inside=f"{name}.").text("content") if isinstance(said, dict) else settings.text(name)
        if text is not None:
            names[name] = text
    return names


def _chat_template(directory: Path, settings: Keys) -> str | None:
    """A file of its own, as newer checkpoints have it, else from tokenizer_config.json: one, or several by name."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return _tried(path, named(path, lambda: path.read_text("utf-8")))
    path = directory / "tokenizer_config.json"
    return _tried(path, named(path, lambda: _default_template(settings)))


def _default_template(settings: Keys) -> str | None:
    if not isinstance(settings.get("chat_template"), list):
        return settings.text("chat_template")
    several = [Keys(entry, inside="chat_template.") for entry in settings.list_of(dict, "chat_template")]
    return {entry.text("name"): entry.text("template") for entry in several}.get("default")


def _tried(path: Path, template: str | None) -> str | None:
    """A chat template that is no danger at its first use. Raises CheckpointError."""
    if template is not None:
        try:
            check(template)
        except UnsafeTemplate as error:
            raise CheckpointError(f"{path}: 'chat_template': {error}") from error
    return template


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    """The tokenizer that stands in the metadata of a GGUF file."""
    found = named(path, lambda: read_tokenizer(metadata))
    template = _tried(path, found.chat_template)
    return _tokenizer(path, found.backend, config, found.bos, found.ends, template, found.names)


def _tokenizer(
    path: Path,
    backend: tokenizers.Tokenizer,
    config: ModelConfig,
    bos: int | None,
    stops: Iterable[int],
    template: str | None,
    names: Mapping[str, str],
) -> Tokenizer:
    last = max([*backend.get_vocab(with_added_tokens=True).values(), bos or 0])
    if last >= config.vocab_size:
        raise CheckpointError(f"{path}: has tokens up to number {last}, but the model has {config.vocab_size}")
    return named(path, lambda: Tokenizer(backend, bos_id=bos, stop_ids=stops, chat_template=template, names=names))


def _bos(backend: tokenizers.Tokenizer) -> int | None:
    """The token that the tokenizer itself puts in front of a text; what it may put behind is no part of a prompt."""
    bare, dressed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    return dressed[0] if dressed[:1] != bare[:1] else None
