"""POST /generate: the native endpoint. One stream of items, two faces: SSE frames or one JSON object."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from tokenteller.model.tokenizer import Tokenizer
from tokenteller.server.api import sse
from tokenteller.server.api.body import SamplingBody, document, read
from tokenteller.server.api.service import Service, request_id, service_of
from tokenteller.server.api.stream import Delta, End, Item, Piece, Silence, Stream, Wanted
from tokenteller.server.engine.sequence import Started
from tokenteller.server.errors import ApiError

router = APIRouter()
T = TypeVar("T")


class GenerateBody(SamplingBody):
    """What a client may ask of /generate."""

    prompt: str | list[int] = Field(description="text, or token ids")
    max_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 128, or what is left of the context"
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="of each token, and of so many of the likeliest")
    stream: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
            return value
        raise ValueError("must be a string or an array of token ids (integers)")

    def wanted(self, id: str) -> Wanted:
        return Wanted(
            id,
            self.prompt,
            self.max_tokens,
            self.sampling(self.logprobs),
            n=self.n,
            stops=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=self.structure(),
            terms=self.terms(),
        )


@router.post("/generate", openapi_extra=document(GenerateBody, streams=True))
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
    """The stream as SSE frames, those together that are ready together, ending with [DONE]."""
    last = sse.DONE
    try:
        async for items in stream.items():
            yield b"".join([_frame(service, stream, item) for item in items])
    except ApiError as error:
        last = sse.frame({"type": "error"} | error.body()) + sse.DONE
    yield last


def _frame(service: Service, stream: Stream, item: Item) -> bytes:
    match item:
        case Delta(index=index, text=text, pieces=pieces):
            told = {"type": "token", "index": index, "text": text}
            return sse.frame(told | token_fields(service.streams.tokenizer, pieces))
        case Started():
            return sse.frame({"type": "start"} | start_fields(service, stream, item))
        case End(index=index):
            return sse.frame({"type": "end", "index": index} | end_fields(stream, item))
        case Silence(comment=comment):
            return sse.comment(comment)


async def fold(service: Service, stream: Stream) -> dict[str, Any]:
    """The same events as one JSON object. Raises ApiError for a failure."""
    answer: dict[str, Any] = {"id": stream.request.id, "slot": None, "kv": None}
    text: dict[int, str] = defaultdict(str)
    pieces: dict[int, list[Piece]] = defaultdict(list)
    ends: dict[int, End] = {}
    async for items in stream.items():
        for item in items:
            match item:
                case Started():
                    fields = start_fields(service, stream, item)
                    answer = {name: fields[name] for name in ("id", "slot", "kv")}
                case Delta(index=index):
                    text[index] += item.text
                    pieces[index] += item.pieces
                case End(index=index):
                    ends[index] = item
    choices = [
        {"index": index, "text": text[index]}
        | token_fields(service.streams.tokenizer, pieces[index])
        | {"finish_reason": end.reason, "seed": stream.request.sampling.seed}
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
        "timing": {"predicted_ttft_ms": predicted_ttft(stream)},
    }


def token_fields(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The ids of these tokens and, when asked for, their logprobs."""
    fields: dict[str, Any] = {"token_ids": [piece.token_id for piece in pieces]}
    entries = [
        {
            "token_id": piece.token_id,
            "text": tokenizer.token_text(piece.token_id),
            "logprob": piece.logprobs.chosen,
            "top": [
                {"token_id": id, "text": tokenizer.token_text(id), "logprob": value} for id, value in piece.logprobs.top
            ],
        }
        for piece in pieces
        if piece.logprobs
    ]
    return fields | {"logprobs": entries} if entries else fields


def end_fields(stream: Stream, end: End) -> dict[str, Any]:
    return {
        "finish_reason": end.reason,
        "usage": usage(stream, end.completion_tokens),
        "seed": stream.request.sampling.seed,
        "timing": timing(stream),
    }


def usage(stream: Stream, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(stream.request.prompt),
        "completion_tokens": completion_tokens,
        "cached_tokens": stream.cached_tokens,
    }


def timing(stream: Stream) -> dict[str, float | None]:
    """Milliseconds from arrival to the slot, to the first token (and as predicted with the slot), and until now."""
    return {
        "queued_ms": _ms(stream.arrived, stream.started_at),
        "ttft_ms": _ms(stream.arrived, stream.first_token_at),
        "predicted_ttft_ms": predicted_ttft(stream),
        "total_ms": _ms(stream.arrived, time.monotonic()),
    }


def predicted_ttft(stream: Stream) -> float | None:
    """Milliseconds from arrival to the first token, as it seemed when the slot was given."""
    if stream.started is None or stream.started_at is None:
        return None
    return _ms(stream.arrived, stream.started_at + stream.started.first_token_s)


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
