"""Type-checked access to what others wrote: JSON files and GGUF metadata. Every error names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenteller.model.formats.errors import ConfigError, naming

T = TypeVar("T")


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ConfigError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ConfigError("it is not a JSON object")
    return value


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} for an optional file that does not exist. Raises CheckpointError."""
    return {} if optional and not path.exists() else naming(path, lambda: json_object(path.read_bytes()))


class Keys:
    """One set of keys, which remembers the ones that were read.

    Every reader treats null as absent and raises ConfigError naming the key.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, inside: str = "") -> None:
        """`inside` prefixes the keys in error messages, for example 'rope_scaling.'."""
        self._raw = {**(defaults or {}), **raw}
        self._present = set(raw)
        self._asked: set[str] = set()
        self.inside = inside

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._typed(key, default, "an integer", int)
        if not least <= value <= most:
            raise self.wrong(key, f"it must be at {f'least {least:,}' if value < least else f'most {most:,}'}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._typed(key, default, "a number", int, float)
        if not 0 <= value <= 1e30:  # rejects NaN, too
            raise self.wrong(key, "it must be from 0 to 1e30")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._typed(key, default, "true or false", bool))

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, None, "a text", str, type(None))
        if value and re.search("[\ud800-\udfff]", value):
            raise self.wrong(key, "it contains half a character (a lone surrogate)")
        return value

    def list_of(self, kind: type[T], key: str, default: list[T] | None = None) -> list[T]:
        values: list[T] = self._typed(key, default, "a list", list)
        if set(map(type, values)) - {kind}:
            at, value = next((at, value) for at, value in enumerate(values) if type(value) is not kind)
            raise ConfigError(f"key '{self.inside}{key}' has {value!r:.80} at {at}; it must be {kind.__name__}")
        return values

    def flat(self, key: str) -> dict[str, Any]:
        """A dict without nested dicts; empty where absent."""
        values: dict[str, Any] = self._typed(key, {}, "one flat set of values", dict)
        if any(isinstance(value, dict) for value in values.values()):
            raise self.wrong(key, "it must be one flat set of values")
        return values

    def one_of(self, key: str, known: Collection[str], default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"supported: {', '.join(map(repr, known))}")
        return value

    def only(self, key: str, value: Any) -> None:
        """Refuses any other value; the key may be absent."""
        if self.get(key, value) != value:
            raise self.wrong(key, f"supported: {value!r}")

    def below(self, prefix: str) -> Keys:
        """The keys that begin with `prefix`, without it."""
        own = {key.removeprefix(prefix): value for key, value in self._raw.items() if key.startswith(prefix)}
        return Keys(own, inside=self.inside + prefix)

    def _typed(self, key: str, default: Any, expected: str, *kinds: type) -> Any:
        value = self.get(key, default)
        if type(value) not in kinds:  # isinstance would accept True as an integer
            raise self.wrong(key, f"it must be {expected}")
        return value

    def wrong(self, key: str, why: str) -> ConfigError:
        value = self._raw.get(key)
        shown = "missing" if value is None else f"{value!r:.80}"
        return ConfigError(f"key '{self.inside}{key}' is {shown}; {why}")

    def unread(self) -> list[str]:
        return sorted(self._present - self._asked)
