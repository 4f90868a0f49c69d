"""What completions and chat have in common: streams become chunks or one object, with usage and an end per choice."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from tokenteller.server.api import sse
from tokenteller.server.api.generate import usage
from tokenteller.server.api.openai.parameters import OpenAIBody
from tokenteller.server.api.service import Service
from tokenteller.server.api.stream import Item, KeepAlive, Stream
from tokenteller.server.api.streams import GenerationRequest
from tokenteller.server.engine.sequence import Started
from tokenteller.server.errors import ApiError
from tokenteller.server.text.choice import Delta, End, Piece


class Answer(ABC):
    """An answer made of one stream per prompt. Choice i of prompt p has index p x n + i."""

    kind: ClassVar[str]  # the `object` of the whole answer
    chunk_kind: ClassVar[str]  # and of a chunk

    def __init__(self, service: Service, body: OpenAIBody, id: str) -> None:
        self.service = service
        self.body = body
        self.id = id
        self.created = int(time.time())
        self.streams: list[Stream] = []
        self.completion_tokens = 0
        self._pumps: list[asyncio.Task[None]] = []

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Fields of a choice's first chunk, if it has one before its text."""

    @abstractmethod
    def part(self, text: str | None) -> dict[str, Any]:
        """Text in a chunk; None in the last chunk."""

    @abstractmethod
    def whole(self, index: int, text: str) -> dict[str, Any]:
        """The whole text of a choice."""

    @abstractmethod
    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """The logprobs of these tokens; None if not asked for."""

    async def open(self, requests: Sequence[GenerationRequest]) -> None:
        """Opens all streams or none. Raises ApiError."""
        try:
            for request in requests:
                self.streams.append(await self.service.streams.open(request))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for stream in self.streams:
            stream.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """Chunks as SSE frames, ending with [DONE]. What is ready together goes out in one write."""
        sent: dict[int, int] = defaultdict(int)  # characters sent of each choice
        try:
            async for prompt, items in self._items():
                ready = [frame for item in items for frame in self._frames(prompt, item, sent)]
                if ready:
                    yield b"".join(ready)
            last = sse.frame(self._chunk([], True)) if self.body.stream_options.include_usage else b""
        except ApiError as error:
            last = sse.frame(error.body(v1=True))
        yield last + sse.DONE

    async def fold(self) -> dict[str, Any]:
        """The same as one JSON object. Raises ApiError for a failure."""
        text: dict[int, str] = defaultdict(str)
        pieces: dict[int, list[Piece]] = defaultdict(list)
        ends: dict[int, End] = {}
        async for prompt, items in self._items():
            for item in items:
                match item:
                    case Delta(index=i):
                        index = prompt * self.body.n + i
                        text[index] += item.text
                        pieces[index] += item.pieces
                    case End(index=i):
                        ends[prompt * self.body.n + i] = item
                        self.completion_tokens += item.completion_tokens
        choices = []
        for index, end in sorted(ends.items()):
            logprobs = self.logprobs(index, [piece for piece in pieces[index] if piece.offset < len(text[index])])
            choices.append({"index": index, **self.whole(index, text[index]), "logprobs": logprobs, **_finish(end)})
        return {**self._envelope(self.kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Counts every generated token, also end tokens; and each prompt once, whatever n is."""
        per_prompt = [usage(stream, 0) for stream in self.streams]
        prompt_tokens = sum(one["prompt_tokens"] for one in per_prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one["cached_tokens"] for one in per_prompt)},
        }

    async def _items(self) -> AsyncIterator[tuple[int, list[Item]]]:
        """The items of all streams, each batch with the number of its prompt."""
        if len(self.streams) == 1:
            async for items in self.streams[0].items():
                yield 0, items
            return
        queue: asyncio.Queue[tuple[int, list[Item] | ApiError | None]] = asyncio.Queue(1)  # passes back-pressure on

        async def pump(prompt: int, stream: Stream) -> None:
            try:
                async for items in stream.items():
                    await queue.put((prompt, items))
                await queue.put((prompt, None))
            except ApiError as error:
                await queue.put((prompt, error))

        self._pumps = [asyncio.create_task(pump(prompt, stream)) for prompt, stream in enumerate(self.streams)]
        open_streams = len(self._pumps)
        while open_streams:
            prompt, batch = await queue.get()
            if batch is None:
                open_streams -= 1
            elif isinstance(batch, ApiError):
                raise batch
            else:
                yield prompt, batch

    def _frames(self, prompt: int, item: Item, sent: dict[int, int]) -> list[bytes]:
        if isinstance(item, KeepAlive):
            return [sse.comment(item.comment)]
        if isinstance(item, Delta):
            self.completion_tokens += len(item.pieces)
        with_usage = self.body.stream_options.continuous_usage_stats
        return [sse.frame(self._chunk([choice], with_usage)) for choice in self._choices(prompt, item, sent)]

    def _choices(self, prompt: int, item: Item, sent: dict[int, int]) -> list[dict[str, Any]]:
        """The chunk choices that one item makes."""
        first = prompt * self.body.n
        match item:
            case Started():
                openings = [(index, self.opening(index)) for index in range(first, first + self.body.n)]
                return [{"index": index, **fields, **_NOT_FINISHED} for index, fields in openings if fields is not None]
            case Delta(index=i):
                index = first + i
                sent[index] += len(item.text)
                pieces = [piece for piece in item.pieces if piece.offset < sent[index]]
                if not item.text and not pieces:
                    return []
                logprobs = self.logprobs(index, pieces)
                return [{"index": index, **self.part(item.text), "logprobs": logprobs, "finish_reason": None}]
            case End(index=i):
                return [{"index": first + i, **self.part(None), "logprobs": None, **_finish(item)}]
        return []

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        chunk = {**self._envelope(self.chunk_kind), "choices": choices}
        options = self.body.stream_options
        if options.include_usage or options.continuous_usage_stats:
            chunk["usage"] = self.usage() if with_usage else None
        return chunk

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model_name}


_NOT_FINISHED = {"logprobs": None, "finish_reason": None}


def _finish(end: End) -> dict[str, Any]:
    """OpenAI has no finish reason for deadline and shutdown: it becomes `length`, with the true one beside it."""
    if end.reason in ("stop", "length"):
        return {"finish_reason": end.reason}
    return {"finish_reason": "length", "stop_reason": end.reason}
