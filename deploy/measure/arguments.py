"""Types of command-line arguments. Each raises ArgumentTypeError, which argparse prints as one line."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

GOALS = ("ttft", "tpot", "e2el")


def number(least: float, kind: type[int] | type[float] = int, above: bool = False) -> Callable[[str], float]:
    """A finite number of at least `least`; with `above`, more than that."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least):
            noun = "a whole number" if kind is int else "a number"
            raise ArgumentTypeError(f"{text!r} is not {noun} {'above' if above else 'of at least'} {least:g}")
        return value

    return parse


def lengths(text: str) -> tuple[int, int]:
    """A count, or the ends of a uniform distribution."""
    try:
        low, high = (int(part) for part in (text.split(":") if ":" in text else (text, text)))
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise ArgumentTypeError(
            f"{text!r} is neither a count of at least 1 (128) nor a range from small to large (32:256)"
        )
    return low, high


def goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise ArgumentTypeError(f"{text!r} is not NAME:MS with a NAME of {', '.join(GOALS)}")
    return name, number(0, float, above=True)(limit)


def text_in(encoding: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError as error:
            raise ArgumentTypeError(f"{text!r} cannot be sent: {error}") from None
        return text

    return parse


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def server_url(text: str) -> str:
    try:
        url = httpx.URL(text)
        valid = url.scheme in ("http", "https") and url.host and (url.port or 0) < 65536
    except httpx.InvalidURL:
        valid = False
    if not valid:
        raise ArgumentTypeError(f"{text!r} is not of the form http://HOST:PORT")
    return text.rstrip("/")


def endpoint(text: str) -> str:
    if not text.startswith("/") or not text.endswith(("/generate", "/completions")):
        raise ArgumentTypeError(f"{text!r} is no path that ends in /generate, /completions or /chat/completions")
    return text


def output_file(text: str) -> str:
    if text != "-" and not Path(text).parent.is_dir():
        raise ArgumentTypeError(f"{text}: no such folder")
    return text
