"""POST /generate, the native endpoint: one stream, answered as SSE frames or as one JSON object."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from tokenteller.model.tokenizer import Tokenizer
from tokenteller.server.api import sse
from tokenteller.server.api.body import read
from tokenteller.server.api.openapi import document
from tokenteller.server.api.parameters import GenerationBody
from tokenteller.server.api.respond import respond
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.api.stream import Item, KeepAlive, Stream
from tokenteller.server.engine.sequence import Started
from tokenteller.server.errors import ApiError
from tokenteller.server.text.choice import Delta, End, Piece

router = APIRouter()


class GenerateBody(GenerationBody):
    """The body of /generate."""

    prompt: str | list[int] = Field(description="text, or token ids")
    max_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 128, or what is left of the context"
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="of each token, and of this many of the likeliest")
    stream: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
            return value
        raise ValueError("must be a string or an array of token ids (integers)")


@router.post("/generate", openapi_extra=document(GenerateBody, streams=True))
async def generate(request: Request) -> Response:
    """Continues a prompt: streamed, or as one JSON object when `stream` is false."""
    service = service_of(request)
    body = await read(request, GenerateBody, service.settings.max_body)
    asked = body.generation(f"gen-{secrets.token_hex(8)}", body.prompt, body.max_tokens, body.logprobs)
    stream = await service.streams.open(asked)
    return await respond(request, NativeAnswer(service, stream), stream=body.stream)


class NativeAnswer:
    """A stream in the form of /generate."""

    def __init__(self, service: Service, stream: Stream) -> None:
        self.id = stream.request.id
        self.close = stream.close
        self._stream = stream
        self._tokenizer = service.streams.tokenizer
        self._bytes_per_token = service.plan.bytes_per_token

    async def frames(self) -> AsyncIterator[bytes]:
        """SSE frames, ending with [DONE]. What is ready together goes out in one write."""
        last = sse.DONE
        try:
            async for items in self._stream.items():
                yield b"".join([self._frame(item) for item in items])
        except ApiError as error:
            last = sse.frame({"type": "error"} | error.body()) + sse.DONE
        yield last

    def _frame(self, item: Item) -> bytes:
        match item:
            case Delta(index=index, text=text, pieces=pieces):
                fields = token_fields(self._tokenizer, pieces)
                return sse.frame({"type": "token", "index": index, "text": text, **fields})
            case Started():
                return sse.frame({"type": "start"} | self._start_fields(item))
            case End(index=index):
                return sse.frame({"type": "end", "index": index} | self._end_fields(item))
            case KeepAlive(comment=comment):
                return sse.comment(comment)

    async def fold(self) -> dict[str, Any]:
        """The same as one JSON object. Raises ApiError for a failure."""
        stream = self._stream
        answer: dict[str, Any] = {"id": self.id, "slot": None, "kv": None}
        text: dict[int, str] = defaultdict(str)
        pieces: dict[int, list[Piece]] = defaultdict(list)
        ends: dict[int, End] = {}
        async for items in stream.items():
            for item in items:
                match item:
                    case Started():
                        fields = self._start_fields(item)
                        answer = {name: fields[name] for name in ("id", "slot", "kv")}
                    case Delta(index=index):
                        text[index] += item.text
                        pieces[index] += item.pieces
                    case End(index=index):
                        ends[index] = item
        choices = [
            {"index": index, "text": text[index]}
            | token_fields(self._tokenizer, pieces[index])
            | {"finish_reason": end.reason, "seed": stream.request.sampling.seed}
            for index, end in sorted(ends.items())
        ]
        completion_tokens = sum(end.completion_tokens for end in ends.values())
        return answer | {"choices": choices, "usage": usage(stream, completion_tokens), "timing": timing(stream)}

    def _start_fields(self, started: Started) -> dict[str, Any]:
        stream = self._stream
        return {
            "id": self.id,
            "slot": started.slot,
            "prompt_tokens": len(stream.request.prompt),
            "cached_tokens": started.cached_tokens,
            "kv": {
                "bytes_per_token": self._bytes_per_token,
                "held": started.held_bytes,
                "max": started.max_bytes,
            },
            "queued_ms": _ms(stream.arrived, stream.started_at),
            "timing": {"predicted_ttft_ms": _predicted_ttft_ms(stream)},
        }

    def _end_fields(self, end: End) -> dict[str, Any]:
        stream = self._stream
        return {
            "finish_reason": end.reason,
            "usage": usage(stream, end.completion_tokens),
            "seed": stream.request.sampling.seed,
            "timing": timing(stream),
        }


def token_fields(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The ids of these tokens and, if asked for, their logprobs."""
    ids = [piece.token_id for piece in pieces]
    if not pieces or pieces[0].logprobs is None:  # asked for with all tokens of a request or with none
        return {"token_ids": ids}
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
    return {"token_ids": ids, "logprobs": entries}


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
        "predicted_ttft_ms": _predicted_ttft_ms(stream),
        "total_ms": _ms(stream.arrived, time.monotonic()),
    }


def _predicted_ttft_ms(stream: Stream) -> float | None:
    if stream.started is None or stream.started_at is None:
        return None
    return _ms(stream.arrived, stream.started_at + stream.started.first_token_s)


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 3)
