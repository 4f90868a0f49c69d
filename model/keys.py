"""Reads what others wrote, JSON files and GGUF headers: every value with its type checked, every error with its key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A config.json or GGUF header that cannot be honoured; the message names the key."""


def json_object(text: bytes) -> dict[str, Any]:
    """What a JSON file says. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ConfigError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ConfigError("it is no JSON object")
    return value


class Keys:
    """Reads keys of one config with their types checked, and knows which ones nobody asked for.

    Every reader takes null as absent, and raises ConfigError naming the key.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, inside: str = "") -> None:
        self._raw = {**(defaults or {}), **raw}
        self._written = set(raw)
        self._asked: set[str] = set()
        self.inside = inside  # where these keys stand, for messages

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
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
        if not 0 <= value <= 1e30:  # nor NaN
            raise self.wrong(key, "it must be from 0 to 1e30")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._typed(key, default, "true or false", bool))

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, None, "a text", str, type(None))
        if value and re.search("[\ud800-\udfff]", value):
            raise self.wrong(key, "it has half a character (a lone surrogate)")
        return value

    def list_of(self, kind: type[T], key: str, default: list[T] | None = None) -> list[T]:
        values: list[T] = self._typed(key, default, "a list", list)
        for at, value in enumerate(values):
            if type(value) is not kind:
                raise ConfigError(f"key '{self.inside}{key}' has {value!r:.80} at {at}; it must be {kind.__name__}")
        return values

    def flat(self, key: str) -> dict[str, Any]:
        """A set of values by name, none of them a set itself; empty where absent."""
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

    def _typed(self, key: str, default: Any, said: str, *kinds: type) -> Any:
        value = self.get(key, default)
        if type(value) not in kinds:  # and not isinstance: True is no integer
            raise self.wrong(key, f"it must be {said}")
        return value

    def wrong(self, key: str, why: str) -> ConfigError:
        value = self._raw.get(key)
        said = "missing" if value is None else f"{value!r:.80}"
        return ConfigError(f"key '{self.inside}{key}' is {said}; {why}")

    def unread(self) -> list[str]:
        """Keys that are there and that nobody asked for."""
        return sorted(self._written - self._asked)
