"""POST /generate: the native endpoint. One stream of items, two faces: SSE frames or one JSON object."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from model.sampler import SamplingParams
from server.api import sse
from server.api.body import Body, read
from server.api.service import Service, request_id, service_of
from server.api.stream import Delta, End, Silence, Stream, Wanted
from server.engine.sequence import Started
from server.errors import ApiError

router = APIRouter()
T = TypeVar("T")

Stop = Annotated[str, Field(min_length=1, max_length=256)]


class GenerateBody(Body):
    """What a client may ask of /generate."""

    prompt: str | list[int] = Field(description="text, or token ids")
    max_tokens: int | None = Field(None, description="tokens to generate; absent: 128, or what is left of the context")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_k: int = Field(0, ge=-1, le=2**31, description="0 or -1 is off")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**64, description="absent: fresh; the end frame tells it")
    stop: list[Stop] | None = Field(
        None, max_length=16, description="a string or up to 16 strings of 1 to 256 characters"
    )
    stop_token_ids: list[int] = Field([], max_length=64)
    ignore_eos: bool = False
    stream: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
            return value
        raise ValueError("must be a string or an array of token ids (integers)")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("max_tokens")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return value

    def wanted(self, id: str) -> Wanted:
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(53) if self.seed is None else self.seed,  # 53 bits survive JavaScript
        )
        return Wanted(id, self.prompt, self.max_tokens, sampling, self.stop or (), self.stop_token_ids, self.ignore_eos)


@router.post(
    "/generate",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": GenerateBody.model_json_schema()}}}
    },
)
async def generate(request: Request) -> Response:
    """Streams what the model says to a prompt, or answers with one JSON object when `stream` is false."""
    service = service_of(request)
    body = await read(request, GenerateBody, service.settings.max_body)
    id = f"gen-{secrets.token_hex(8)}"
    stream = await service.streams.open(body.wanted(id))
    headers = {"X-Request-Id": request_id(request, id)}
    if body.stream:
        return sse.EventStreamResponse(frames(service, stream), stream.close, headers)
    try:
        answer = await unless_gone(request, fold(service, stream))
    finally:
        stream.close()
    if answer is None:
        return Response(status_code=499)  # nobody is there to read it
    return Response(sse.json_line(answer), media_type="application/json", headers=headers)


async def frames(service: Service, stream: Stream) -> AsyncIterator[bytes]:
    """The stream as SSE frames, ending with [DONE]."""
    try:
        async for item in stream.items():
            match item:
                case Started():
                    yield sse.frame({"type": "start"} | start_fields(service, stream, item))
                case Delta(index=index, text=text, token_ids=ids):
                    yield sse.frame({"type": "token", "index": index, "text": text, "token_ids": ids})
                case End(index=index):
                    yield sse.frame({"type": "end", "index": index} | end_fields(stream, item))
                case Silence(waiting=waiting):
                    yield sse.comment("waiting" if waiting else "working")
    except ApiError as error:
        yield sse.frame({"type": "error"} | error.body())
    yield sse.DONE


async def fold(service: Service, stream: Stream) -> dict[str, Any]:
    """The same events as one JSON object. Raises ApiError for a failure."""
    answer: dict[str, Any] = {}
    text: dict[int, str] = defaultdict(str)
    ids: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, End] = {}
    async for item in stream.items():
        match item:
            case Started():
                fields = start_fields(service, stream, item)
                answer = {name: fields[name] for name in ("id", "slot", "kv")}
            case Delta(index=index, text=piece, token_ids=token_ids):
                text[index] += piece
                ids[index] += token_ids
            case End(index=index):
                ends[index] = item
    choices = [
        {
            "index": index,
            "text": text[index],
            "token_ids": ids[index],
            "finish_reason": end.reason,
            "seed": stream.request.sampling.seed,
        }
        for index, end in sorted(ends.items())
    ]
    completion_tokens = sum(end.completion_tokens for end in ends.values())
    return answer | {"choices": choices, "usage": usage(stream, completion_tokens), "timing": timing(stream)}


def start_fields(service: Service, stream: Stream, started: Started) -> dict[str, Any]:
    kv = {
        "bytes_per_token": service.plan.bytes_per_token,
        "held": started.held_bytes,
        "max": started.max_bytes,
    }
    return {
        "id": stream.request.id,
        "slot": started.slot,
        "prompt_tokens": len(stream.request.prompt),
        "cached_tokens": started.cached_tokens,
        "kv": kv,
        "queued_ms": _ms(stream.arrived, stream.started_at),
    }


def end_fields(stream: Stream, end: End) -> dict[str, Any]:
    return {
        "finish_reason": end.reason,
        "usage": usage(stream, end.completion_tokens),
        "seed": stream.request.sampling.seed,
        "timing": timing(stream),
    }


def usage(stream: Stream, completion_tokens: int) -> dict[str, int]:
    cached = stream.started.cached_tokens if stream.started else 0
    return {
        "prompt_tokens": len(stream.request.prompt),
        "completion_tokens": completion_tokens,
        "cached_tokens": cached,
    }


def timing(stream: Stream) -> dict[str, float | None]:
    """Milliseconds from arrival to the slot, to the first token, and until now."""
    return {
        "queued_ms": _ms(stream.arrived, stream.started_at),
        "ttft_ms": _ms(stream.arrived, stream.first_token_at),
        "total_ms": _ms(stream.arrived, time.monotonic()),
    }


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client leaves first; then the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 3)
