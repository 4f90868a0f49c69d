"""Strict JSON: no NaN or Infinity, no overflowing numbers, no duplicate keys, no lone surrogates, bounded depth."""

from __future__ import annotations

import json
import math
from typing import Any

from tokenteller.server.errors import BadRequest

MAX_DEPTH = 100
MAX_DIGITS = 40  # of an integer: converting millions of digits takes quadratic time
SHOWN_CHARS = 60


def parse(body: bytes) -> Any:
    """The value of a request body. Raises BadRequest."""
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
        )
        if (body.count(b"[") + body.count(b"{") > MAX_DEPTH) and _deeper_than(MAX_DEPTH, value):
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: invalid byte at {error.start}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if "\\u" in text and _has_lone_surrogate(value):
        raise BadRequest("the body has a lone surrogate: \\ud800 to \\udfff are valid in pairs only")
    return value


def quoted(text: str) -> str:
    """What a client sent, short enough and safe to repeat in an error message."""
    return json.dumps(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, item) for item in inner)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadRequest(f"duplicate key {quoted(duplicate)} in an object")
    return value


def _constant(name: str) -> Any:
    raise BadRequest(f"{name} is not JSON; numbers must be finite")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequest(f"the number {digits[:MAX_DIGITS]} is too large")
    return value


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise BadRequest(f"the integer {digits[:20]}... has {len(digits)} digits; the limit is {MAX_DIGITS}")
    return int(digits)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
