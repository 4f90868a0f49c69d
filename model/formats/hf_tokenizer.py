"""The tokenizer of a Hugging Face checkpoint: tokenizer.json and the files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

from tokenteller.model.chat import UnsafeTemplate, check
from tokenteller.model.config import ModelConfig
from tokenteller.model.formats.errors import CheckpointError, naming
from tokenteller.model.formats.keys import Keys, read_json
from tokenteller.model.tokenizer import Tokenizer
from tokenteller.model.tokenizer_file import read_tokenizer


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """tokenizer.json, with BOS, the stop ids and the chat template from the files beside it. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    if not path.exists():
        others = ", ".join(
            name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (directory / name).exists()
        )
        remedy = f" ({others} alone cannot be read; AutoTokenizer.save_pretrained writes it)" if others else ""
        raise CheckpointError(f"{path}: no such file{remedy}")
    backend = naming(path, lambda: read_tokenizer(path))
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
    names = naming(file, lambda: _special_tokens(settings))
    eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if eos is not None:
        stops.add(eos)
    bos = naming(path, lambda: _bos(backend))
    return build_tokenizer(path, backend, config, bos, stops, _chat_template(directory, settings), names)


def _special_tokens(settings: Keys) -> dict[str, str]:
    """Under the names that chat templates use. A token is written as text or as a dict with its text as `content`."""
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        entry = settings.get(name)
        text = Keys(entry, inside=f"{name}.").text("content") if isinstance(entry, dict) else settings.text(name)
        if text is not None:
            names[name] = text
    return names


def _chat_template(directory: Path, settings: Keys) -> str | None:
    """From a file of its own in newer checkpoints, else from tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return checked_template(path, naming(path, lambda: path.read_text("utf-8")))
    path = directory / "tokenizer_config.json"
    return checked_template(path, naming(path, lambda: _default_template(settings)))


def _default_template(settings: Keys) -> str | None:
    """`chat_template` is a text or a list of templates by name."""
    if not isinstance(settings.get("chat_template"), list):
        return settings.text("chat_template")
    several = [Keys(entry, inside="chat_template.") for entry in settings.list_of(dict, "chat_template")]
    return {entry.text("name"): entry.text("template") for entry in several}.get("default")


def checked_template(path: Path, template: str | None) -> str | None:
    """The template, once it has been shown to be safe to run. Raises CheckpointError."""
    if template is not None:
        try:
            check(template)
        except UnsafeTemplate as error:
            raise CheckpointError(f"{path}: 'chat_template': {error}") from error
    return template


def build_tokenizer(
    path: Path,
    backend: tokenizers.Tokenizer,
    config: ModelConfig,
    bos: int | None,
    stops: Iterable[int],
    template: str | None,
    names: Mapping[str, str],
) -> Tokenizer:
    """Raises CheckpointError where the tokenizer has more tokens than the model."""
    last = max([*backend.get_vocab(with_added_tokens=True).values(), bos or 0])
    if last >= config.vocab_size:
        raise CheckpointError(f"{path}: has tokens up to number {last}, but the model has {config.vocab_size}")
    return naming(path, lambda: Tokenizer(backend, bos_id=bos, stop_ids=stops, chat_template=template, names=names))


def _bos(backend: tokenizers.Tokenizer) -> int | None:
    """The token the tokenizer itself puts before a text. One that it puts after is not part of a prompt."""
    plain, framed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    return framed[0] if framed[:1] != plain[:1] else None
