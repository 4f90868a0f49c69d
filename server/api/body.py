"""Reading a request body: bounded, strict JSON, checked by a pydantic model; every fault is a 4xx in our form."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import ClientDisconnect, Request

from tokenteller.model.grammar import Kind
from tokenteller.model.sampler import SamplingParams
from tokenteller.server.api.stream import Terms
from tokenteller.server.errors import BadRequest, BodyTimeout, BodyTooLarge, Unprocessable, UnsupportedMediaType

Model = TypeVar("Model", bound="Body")
BODY_S = 30  # a client that sends slower than this is not waited for


class Body(BaseModel):
    """A request body, or an object in one: no coercion ("10" is not 10, true is not 1), no unknown fields; null is the
    same as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in given.items() if value is not None or key not in known}

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        """Refuses what the fields alone cannot tell. Raises ApiError."""


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingBody(Body):
    """What every endpoint that generates takes: how tokens are drawn, and where the text ends."""

    max_tokens: int | None = Field(None, ge=1, description="tokens to generate")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_k: int = Field(0, ge=-1, le=2**31, description="0 or -1 is off")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="counts prompt and output; 1 is off")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="counts the output")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="counts the output")
    logit_bias: dict[str, Bias] = Field({}, max_length=1024, description="token id, as a string, to -100..100")
    seed: int | None = Field(None, ge=0, lt=2**64, description="absent: fresh")
    n: int = Field(1, ge=1, le=8, description="choices, each with its own stream of random numbers")
    stop: list[Stop] = Field([], max_length=16, description="a string or up to 16 strings of 1 to 256 characters")
    stop_token_ids: list[int] = Field([], max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, description="no end and no stop before so many tokens")
    priority: int = Field(0, ge=-100, le=100, description="lower goes first; each step is worth 10 s of waiting")
    deadline_ms: int | None = Field(None, ge=1, le=2**31, description="ends it with what it has by then")
    max_queue_ms: int | None = Field(None, ge=1, le=2**31, description="ends it if it has no slot by then")
    cache_prefix: bool = Field(True, description="whether rows of its prompt may be reused, from others and by others")
    cache_salt: str = Field("", max_length=256, description="rows are reused only where the salt is the same")
    json_schema: dict[str, Any] | None = Field(None, description="the text is JSON that this schema allows")
    regex: str | None = Field(None, description="the whole text matches this regular expression")
    grammar: str | None = Field(None, description="the whole text is of this grammar, in llguidance's form of Lark")

    def structure(self) -> tuple[Kind, str] | None:
        """What the text must be. Raises Unprocessable."""
        given: dict[Kind, str | None] = {
            "json_schema": None if self.json_schema is None else json.dumps(self.json_schema, ensure_ascii=False),
            "regex": self.regex,
            "grammar": self.grammar,
        }
        asked = [(kind, text) for kind, text in given.items() if text is not None]
        if len(asked) > 1:
            raise Unprocessable(f"give one of {' and '.join(kind for kind, _ in asked)}", param=asked[1][0])
        for kind, _ in asked:
            self.refuse_beside_a_grammar(kind)
        return asked[0] if asked else None

    def refuse_beside_a_grammar(self, name: str) -> None:
        """What would cut a structured answer off, or keep it from ending. Raises Unprocessable."""
        for field in ("stop", "stop_token_ids", "ignore_eos", "min_tokens"):
            if getattr(self, field):
                raise Unprocessable(f"{field} cannot be combined with {name}: the answer might not parse", param=field)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: dict[str, float]) -> dict[str, float]:
        wrong = next((key for key in value if not re.fullmatch(r"[0-9]{1,10}", key)), None)
        if wrong is not None:
            raise ValueError(f"the key {_shown(wrong)} is not a token id")
        if len({int(key) for key in value}) < len(value):
            raise ValueError("one token id stands there twice")
        return value

    def terms(self) -> Terms:
        return Terms(self.priority, self.deadline_ms, self.max_queue_ms, self.cache_prefix, self.cache_salt)

    def sampling(self, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(53) if self.seed is None else self.seed % 2**64,  # 53 bits survive JavaScript
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(key), bias) for key, bias in self.logit_bias.items()),
            min_tokens=self.min_tokens,
            logprobs=logprobs,
        )


async def read(request: Request, model: type[Model], limit: int) -> Model:
    """The body as `model`. Raises ApiError: 400 for what is no JSON, 408, 413, 415, or 422 for a wrong field."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"the content encoding {_shown(encoding)} is not supported; send plain JSON")
    body = await _bytes(request, limit)
    if len(body) > _LONG:  # it would stall the other streams
        return await asyncio.to_thread(lambda: validate(parse(body), model))
    return validate(parse(body), model)


_LONG = 32_768


async def _bytes(request: Request, limit: int) -> bytes:
    stream, body = request.stream(), bytearray()
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        if "expect" not in request.headers:  # else it has sent nothing yet
            await _discard(stream)
        raise _too_large(limit, int(announced))
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in stream:
                body += chunk
                if len(body) > limit:
                    break
    except TimeoutError:
        raise BodyTimeout(f"the body was not complete after {BODY_S} s: {len(body)} bytes came") from None
    except ClientDisconnect:
        raise BadRequest("the client left before its body was complete") from None
    if len(body) > limit:
        await _discard(stream)
        raise _too_large(limit, len(body))
    return bytes(body)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Reads on for a while and throws it away: a client that still sends when the connection is closed would see a
    broken pipe instead of its answer."""
    now = asyncio.get_running_loop().time
    end, left = now() + 2.0, 64 * 2**20
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(0.25) as pause:
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return
                pause.reschedule(min(end, now() + 0.25))


def _too_large(limit: int, got: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {got} bytes or more; at most {limit} are taken", max_body_bytes=limit)


def parse(body: bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no number that overflows to it, no duplicate keys, no lone surrogates."""
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_not_json, parse_float=_finite, parse_int=_bounded_int
        )
        if (body.count(b"[") + body.count(b"{") > _MAX_DEPTH) and _deeper_than(_MAX_DEPTH, value):
            raise BadRequest(f"the body is nested more than {_MAX_DEPTH} levels deep")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} is not valid") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if "\\u" in text and _has_lone_surrogate(value):
        raise BadRequest("the body has a lone surrogate: \\ud800 to \\udfff only stand in pairs")
    return value


_MAX_DEPTH = 100


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, item) for item in inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
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
    model.screen(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _named(error) from None


def _named(error: ValidationError) -> Unprocessable:
    faults = error.errors(include_url=False)
    unknown = [str(fault["loc"][-1]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(_shown(name) for name in unknown[:5])
        return Unprocessable(f"unknown field {names}", param=unknown[0][:100])
    fault = faults[0]
    field = ".".join(str(part)[:60] for part in fault["loc"]) or None
    given, numbers = fault["input"], fault.get("ctx", {})
    if isinstance(given, str | list | dict):
        numbers["length"] = len(given)
    said = _SAID.get(fault["type"])
    message = said.format_map(numbers) if said else fault["msg"].removeprefix("Value error, ")
    if isinstance(given, bool | int | float):
        message += f", got {json.dumps(given)}"
    return Unprocessable(f"{field}: {message}" if field else message, param=field)


_SAID = {
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


def document(model: type[Body], *, streams: bool = False) -> dict[str, Any]:
    """The body in the OpenAPI document; routes read it themselves, so FastAPI cannot know it."""
    schema = _inlined(model.model_json_schema())
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return extra | answers("text/event-stream") if streams else extra


def answers(media_type: str) -> dict[str, Any]:
    """What a route can answer beside JSON, in the OpenAPI document."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    schema = event if media_type == "text/event-stream" else {"type": "string"}
    return {"responses": {"200": {"content": {media_type: {"schema": schema}}}}}


def _inlined(schema: dict[str, Any]) -> Any:
    """A JSON schema without references, which would point to nowhere inside the OpenAPI document."""
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(definitions[value["$ref"].removeprefix("#/$defs/")])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    return inline(schema)


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
