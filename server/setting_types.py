"""How settings that are more than a number or a word are written: sizes, API keys, web origins, lists."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: Any) -> Any:
    """'2GiB', '512MB', '4096' -> bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB, GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_keys(value: Any) -> Any:
    """'key', 'key,key' or '@FILE' with one key per line -> keys. No message ever shows a key."""
    if not isinstance(value, str):
        return value
    keys: list[str] = []
    for part in value.split(","):
        if part.startswith("@"):
            try:
                with open(part[1:], encoding="utf-8") as file:
                    keys += [line.strip() for line in file if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read keys from {part[1:]}: {error}") from None
        else:
            keys.append(part.strip())
    if not keys or not all(re.fullmatch(r"[\x21-\x7e]{8,256}", key) for key in keys):
        raise ValueError("a key has 8 to 256 printable ASCII characters and no space or comma")
    return tuple(keys)


def parse_origins(value: Any) -> Any:
    """'https://a.example,http://localhost:3000' or '*' -> origins."""
    if not isinstance(value, str):
        return value
    origins = [origin.strip() for origin in value.split(",")]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
            raise ValueError(f"{origin!r} is not an origin; write scheme://host or scheme://host:port, or * for any")
    return tuple(origins)


def parse_counts(value: Any) -> Any:
    """'1,2,4' -> (1, 2, 4)."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def parse_text(value: Any) -> Any:
    """Refuses an argument that is not UTF-8: Python makes lone surrogates of it, which no request can carry."""
    return value.encode(errors="surrogateescape").decode() if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
ApiKeys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(parse_keys)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_origins)]
Text = Annotated[str, BeforeValidator(parse_text)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], NoDecode, BeforeValidator(parse_counts)]
