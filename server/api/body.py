"""Reading a request body: bounded, strict JSON, checked by a pydantic model; every fault is a 4xx in our form."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from server.errors import BadRequest, BodyTooLarge, Unprocessable

Model = TypeVar("Model", bound="Body")


class Body(BaseModel):
    """A request body: no coercion ("10" is not 10, true is not 1), no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


async def read(request: Request, model: type[Model], limit: int) -> Model:
    """The body as `model`. Raises BodyTooLarge (413), BadRequest (400) or Unprocessable (422)."""
    return validate(parse(await _bytes(request, limit)), model)


async def _bytes(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, int(announced))
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit, len(body))
    except ClientDisconnect:
        raise BadRequest("the client left before its body was complete") from None
    return bytes(body)


def _too_large(limit: int, got: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {got} bytes or more; at most {limit} are taken", max_body_bytes=limit)


def parse(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no number that overflows to it, no duplicate keys, no lone surrogates."""
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_not_json, parse_float=_finite, parse_int=_bounded_int
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} is not valid") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if "\\u" in text and _has_lone_surrogate(value):
        raise BadRequest("the body has a lone surrogate: \\ud800 to \\udfff only stand in pairs")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRequest(f"the key {_shown(twice)} stands twice in one object")
    return value


def _not_json(constant: str) -> Any:
    raise BadRequest(f"{constant} is not JSON; numbers must be finite")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRequest(f"the number {digits[:40]} is too large")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > 40:
        raise BadRequest(f"the integer {digits[:20]}... has {len(digits)} digits; at most 40 are taken")
    return int(digits)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def validate(value: Any, model: type[Model]) -> Model:
    """`value` as `model`; the first fault is named with its field. Raises Unprocessable (422)."""
    if not isinstance(value, dict):
        raise Unprocessable(f"the body must be a JSON object, not {_kind(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _named(error) from None


def _named(error: ValidationError) -> Unprocessable:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [str(fault["loc"][-1]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(_shown(name) for name in unknown[:5])
        return Unprocessable(f"unknown field {names}", param=unknown[0][:100])
    fault = faults[0]
    field = str(fault["loc"][0]) if fault["loc"] else None
    message = fault["msg"].removeprefix("Value error, ")
    return Unprocessable(f"{field}: {message}" if field else message, param=field)


def _shown(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else name[:60] + "...")


def _kind(value: Any) -> str:
    kinds = {
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return kinds[type(value)]
