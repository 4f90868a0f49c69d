"""A checkpoint directory -> config, weights, tokenizer. What is missing or odd is named in a CheckpointError."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from safetensors.torch import load_file

from model.config import TOY, ConfigError, ModelConfig, locate
from model.decoder import Decoder
from model.linear import Storage
from model.tokenizer import Tokenizer

T = TypeVar("T")


class CheckpointError(ValueError):
    """A model that cannot be loaded; one line that names the file and what is amiss in it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model and how it turns text into ids."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


def load(model: str, storage: Storage) -> Checkpoint:
    """Everything of one model. Raises CheckpointError."""
    try:
        config, directory = ModelConfig.read(model), locate(model)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    weights_path = directory / "model.safetensors"
    decoder = _named(weights_path, lambda: Decoder(config, load_file(weights_path), storage))
    name = "toy" if directory == TOY else directory.name
    return Checkpoint(name, config, decoder, load_tokenizer(directory, config))


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
