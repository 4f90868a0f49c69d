"""Reads a request body: bounded in size and time, strict JSON, checked by a pydantic model. Every fault is a 4xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from tokenteller.server.api.strict_json import parse, quoted
from tokenteller.server.errors import BadRequest, BodyTimeout, BodyTooLarge, Unprocessable, UnsupportedMediaType

Model = TypeVar("Model", bound="Body")

BODY_S = 30  # for the whole body
LONG_BODY = 32_768  # bytes; parsing more on the event loop would stall the other streams


class Body(BaseModel):
    """A request body or an object inside one. No coercion ("10" is not 10, true is not 1), no unknown fields; null
    means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in given.items() if value is not None or key not in known}

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        """Checks that need the whole body, before its fields are validated. Raises ApiError."""


async def read(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The request's body as a `model`. Raises ApiError: 400 if it is not JSON, 408, 413, 415, or 422 for a field."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"content encoding {quoted(encoding)} is not supported; send plain JSON")
    body = await _receive(request, max_bytes)
    if len(body) > LONG_BODY:
        return await asyncio.to_thread(lambda: validate(parse(body), model))
    return validate(parse(body), model)


async def _receive(request: Request, max_bytes: int) -> bytes:
    stream, body = request.stream(), bytearray()
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        if "expect" not in request.headers:  # with it, the client has not begun to send
            await _discard(stream)
        raise _too_large(max_bytes, int(announced))
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in stream:
                body += chunk
                if len(body) > max_bytes:
                    break
    except TimeoutError:
        raise BodyTimeout(f"the body was incomplete after {BODY_S} s: {len(body)} bytes received") from None
    except ClientDisconnect:
        raise BadRequest("the client disconnected before its body was complete") from None
    if len(body) > max_bytes:
        await _discard(stream)
        raise _too_large(max_bytes, len(body))
    return bytes(body)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Keeps reading for a moment: a client that is still sending when the connection closes would see a broken pipe
    instead of the response."""
    now = asyncio.get_running_loop().time
    end, left = now() + 2.0, 64 * 2**20
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(0.25) as pause:
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return
                pause.reschedule(min(end, now() + 0.25))


def _too_large(max_bytes: int, got: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has at least {got} bytes; the limit is {max_bytes}", max_body_bytes=max_bytes)


def validate(value: Any, model: type[Model]) -> Model:
    """`value` as a `model`. Raises Unprocessable naming the first wrong field."""
    if not isinstance(value, dict):
        raise Unprocessable(f"the body must be a JSON object, not {_KINDS[type(value)]}")
    model.screen(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _in_our_words(error) from None


def _in_our_words(error: ValidationError) -> Unprocessable:
    faults = error.errors(include_url=False)
    unknown = [str(fault["loc"][-1]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(quoted(name) for name in unknown[:5])
        return Unprocessable(f"unknown field {names}", param=unknown[0][:100])
    fault = faults[0]
    field = ".".join(str(part)[:60] for part in fault["loc"]) or None
    given, numbers = fault["input"], fault.get("ctx", {})
    if isinstance(given, str | list | dict):
        numbers["length"] = len(given)
    template = _MESSAGES.get(fault["type"])
    message = template.format_map(numbers) if template else fault["msg"].removeprefix("Value error, ")
    if isinstance(given, bool | int | float):
        message += f", got {json.dumps(given)}"
    return Unprocessable(f"{field}: {message}" if field else message, param=field)


# Pydantic's own messages speak of Python types.
_MESSAGES = {
    "missing": "is required",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters, got {length}",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length} entries, got {length}",
    "literal_error": "must be {expected}",
}
_KINDS: dict[type, str] = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
