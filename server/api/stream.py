"""The event-loop side of one request: detokenise, match stop strings, bound the buffer, cancel on close."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from model.kv_memory import rows_max
from model.sampler import SamplingParams
from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.sequence import Event, Failed, Finished, Request, Started, Token
from server.errors import ApiError, EngineFailure, NeverFits, QueueFull, SlowReader, Unavailable, Unprocessable

log = logging.getLogger("tokenteller")

SILENCE_S = 10.0  # after so long without a frame, a comment is sent


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of one choice that is ready, and the tokens it came from."""

    index: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The one end of a choice that went well."""

    index: int
    reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for a while; `waiting` for a slot, or for the next token."""

    waiting: bool


Item = Started | Delta | End | Silence


class StopMatcher:
    """Finds the earliest stop string in a text that comes in pieces; holds back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string was completed (then it ends before the match)."""
        text = self._held + piece
        if not self._stops:
            return text, False
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        keep = self._tail(text)
        if found and min(found) <= len(text) - keep:
            self._held = ""
            return text[: min(found)], True
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> tuple[str, bool]:
        """What was held back, now that nothing more comes; a complete match in it still counts."""
        held, self._held = self._held, ""
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        return (held[: min(found)], True) if found else (held, False)

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string without completing it."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Choice:
    """The text of one choice, from tokens to what may be sent."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: Request, stops: Sequence[str]) -> None:
        self.index = index
        self.end: End | None = None
        self.completion_tokens = 0
        self.pending_ids: list[int] = []
        self._pending_text = ""
        self._end_ids = request.stop_ids
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(stops)

    def take(self, token_id: int) -> None:
        """One more token; ends the choice where it completes a stop string."""
        self.completion_tokens += 1
        self.pending_ids.append(token_id)
        if token_id not in self._end_ids:  # an end token is no part of the text
            self._append(self._detokenizer.push(token_id))

    def finish(self, reason: str) -> None:
        """No more tokens: what was held back is sent; a stop string that is complete by then is the reason."""
        self._append(self._detokenizer.flush())
        if self.end is None:
            text, stopped = self._stops.flush()
            self._pending_text += text
            self.end = End(self.index, "stop" if stopped else reason, self.completion_tokens)

    def ready(self) -> Delta | None:
        """What can be sent now; ids wait for the text they belong to, and go at the end at the latest."""
        if not self._pending_text and not (self.end and self.pending_ids):
            return None
        delta = Delta(self.index, self._pending_text, tuple(self.pending_ids))
        self._pending_text, self.pending_ids = "", []
        return delta

    def _append(self, piece: str) -> None:
        text, stopped = self._stops.push(piece)
        self._pending_text += text
        if stopped:
            self.end = End(self.index, "stop", self.completion_tokens)


class Stream:
    """One request's events, from the engine to one reader. Lives on the event loop only."""

    def __init__(self, streams: Streams, request: Request, stops: Sequence[str]) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.started: Started | None = None
        self._streams = streams
        self._choices = [Choice(index, streams.tokenizer, request, stops) for index in range(request.n)]
        self._error: ApiError | None = None
        self._held_since: float | None = None
        self._closed = False
        self._wake = asyncio.Event()

    async def items(self) -> AsyncIterator[Item]:
        """What happens, in order: Started, then Deltas and an End per choice; Silence in between.

        Raises ApiError for a failure, after what was ready before it.
        """
        told_start, open_choices = False, list(self._choices)
        while open_choices:
            if not self._wake.is_set():
                try:
                    async with asyncio.timeout(SILENCE_S):
                        await self._wake.wait()
                except TimeoutError:
                    yield Silence(waiting=self.started is None)
                    continue
            self._wake.clear()
            error = self._error
            if self.started and not told_start:
                told_start = True
                yield self.started
            for choice in list(open_choices):
                end = choice.end  # before what is ready, so that nothing comes after it
                delta = choice.ready()
                if delta:
                    yield delta
                if end:
                    open_choices.remove(choice)
                    yield end
            self._release()
            if error and open_choices:
                raise error

    def receive(self, event: Event) -> None:
        """Takes one event of the engine."""
        choice = self._choices[event.index]
        if self._closed or choice.end:
            return
        match event:
            case Started():
                if self.started is None:
                    self.started_at, self.started = time.monotonic(), event
            case Token(token_id=token_id):
                if self.first_token_at is None:
                    self.first_token_at = time.monotonic()
                choice.take(token_id)
                if choice.end:
                    self._streams.engine.cancel(self.request.id, choice.index)
            case Finished(reason=reason):
                choice.finish(reason)
            case Failed(message=message):
                self.fail(EngineFailure(message))
        if all(choice.end for choice in self._choices):
            self.close()
        elif sum(len(choice.pending_ids) for choice in self._choices) >= self._streams.buffer_tokens:
            self._hold()
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error."""
        if not self._closed:
            self._error = error
            self.close()
            self._wake.set()

    def finish(self, reason: str) -> None:
        """Ends what is open with `reason`, after the text it has. A stream that never got a slot fails instead."""
        if self.started is None:
            self.fail(Unavailable("the server ends before the request got a slot; ask again", retry_after_s=1))
            return
        for choice in self._choices:
            choice.finish(reason)
        self.close()
        self._wake.set()

    def close(self) -> None:
        """All is received, or the reader is gone: nothing more is wanted. Safe to call at any time and again."""
        self._closed = True
        self._streams.forget(self)

    def _hold(self) -> None:
        if self._held_since is None:
            self._held_since = time.monotonic()
            self._streams.engine.hold(self.request.id, True)
            asyncio.get_running_loop().call_later(self._streams.slow_reader_s, self._give_up, self._held_since)

    def _release(self) -> None:
        if self._held_since is not None:
            self._held_since = None
            if not self._closed:
                self._streams.engine.hold(self.request.id, False)

    def _give_up(self, held_since: float) -> None:
        if self._held_since == held_since:
            self.fail(SlowReader(f"nothing was read for {self._streams.slow_reader_s:g} s"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A generation as an endpoint asks for it."""

    id: str
    prompt: str | Sequence[int]
    max_tokens: int | None
    sampling: SamplingParams
    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


class Streams:
    """All open streams. Decides at the door; hands the engine's events to whom they belong."""

    DEFAULT_MAX_TOKENS = 128

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        buffer_tokens: int,
        slow_reader_s: float,
        queue_limit: int,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.buffer_tokens = buffer_tokens
        self.slow_reader_s = slow_reader_s
        self.queue_limit = queue_limit
        self.ended: str | None = None  # why no event will ever come again
        self.stuck: str | None = None  # why none comes now
        self.drain_until: float | None = None  # monotonic; set once the server was told to end
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, wanted: Wanted) -> Stream:
        """Tokenises, refuses what can never fit or has no place to wait, registers, submits. Raises ApiError."""
        prompt = await self._ids(wanted.prompt)
        request = Request(
            id=wanted.id,
            prompt=prompt,
            max_tokens=self._max_tokens(len(prompt), wanted.max_tokens),
            sampling=wanted.sampling,
            stop_ids=frozenset(wanted.stop_token_ids) | (frozenset() if wanted.ignore_eos else self.tokenizer.stop_ids),
        )
        self._refuse_what_cannot_be_taken()
        stream = Stream(self, request, wanted.stops)
        self._open[request.id] = stream  # registered before it is submitted, so that no event finds no stream
        self.engine.submit(request)
        return stream

    def deliver(self, events: list[Event]) -> None:
        """Events of one step."""
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:
                continue
            try:
                stream.receive(event)
            except Exception as error:  # a fault in one text must not cost the others their tokens
                log.exception("a stream failed")
                stream.fail(EngineFailure(f"the server failed on this stream with {type(error).__name__}"))

    def end_all(self, reason: str) -> None:
        """No more events will come."""
        self.ended = reason
        self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """Ends every stream with an error."""
        for stream in list(self._open.values()):
            stream.fail(EngineFailure(reason))

    def finish_all(self, reason: str) -> None:
        """Ends every stream as it stands."""
        for stream in list(self._open.values()):
            stream.finish(reason)

    def sick(self) -> str | None:
        """Why the engine makes no tokens: it is dead or stuck; None when it is well."""
        return self.ended or (None if self.engine.alive else "the engine is not running") or self.stuck

    def check_open(self) -> None:
        """Raises Unavailable when no request can be taken: draining, or the engine is sick."""
        if self.drain_until is not None:
            left = max(1, round(self.drain_until - time.monotonic()))
            raise Unavailable("the server is draining; it ends soon", retry_after_s=left)
        sick = self.sick()
        if sick:
            raise Unavailable(sick, retry_after_s=5)

    def forget(self, stream: Stream) -> None:
        """The stream has ended on this side; whatever still runs for it is cancelled."""
        if self._open.pop(stream.request.id, None) is not None:
            self.engine.cancel(stream.request.id)

    async def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            outside = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
            if outside is not None:
                raise Unprocessable(f"prompt: token id {outside} is not in 0..{self.vocab_size - 1}", param="prompt")
            ids: Sequence[int] = prompt
        elif len(prompt) > 4096:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)  # a long text would stall the other streams
        else:
            ids = self.tokenizer.encode(prompt)
        if not ids:
            raise Unprocessable("prompt: it has no tokens", param="prompt")
        return tuple(ids)

    def _max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """What was asked, or the default; refuses what neither the context nor the pool could ever hold."""
        ledger = self.engine.scheduler.ledger
        layout = ledger.layout
        context, pool_rows = layout.max_context, layout.rows_that_fit(ledger.budget_bytes)
        most = max(0, min(context - prompt_tokens, pool_rows - prompt_tokens + 1))
        wanted = min(self.DEFAULT_MAX_TOKENS, most) if asked is None else asked
        if 1 <= wanted <= most:
            return wanted
        needed = layout.committed(min(rows_max(prompt_tokens, max(wanted, 1)), 2**40))
        numbers = {
            "prompt_tokens": prompt_tokens,
            "max_context": context,
            "max_tokens_that_fits": most,
            "needed_bytes": needed,
            "pool_bytes": ledger.budget_bytes,
        }
        told = f"the prompt has {prompt_tokens} tokens"
        limit = f"the context {context} and the pool {ledger.budget_bytes} bytes"
        remedy = (
            f"max_tokens may be at most {most}"
            if most
            else f"shorten the prompt by {prompt_tokens - min(context, pool_rows + 1) + 1} tokens"
        )
        raise NeverFits(
            f"{told} and max_tokens is {max(wanted, 1)}, which needs {needed} bytes of K/V; {limit}: {remedy}",
            param="max_tokens" if most else "prompt",
            **numbers,
        )

    def _refuse_what_cannot_be_taken(self) -> None:
        self.check_open()
        status = self.engine.status
        waiting = sum(stream.started is None for stream in self._open.values())
        seats = 0 if status.blocked_by else status.free_slots
        if waiting - seats >= self.queue_limit:
            retry = max(1, round(status.soonest_free_s))
            raise QueueFull(
                f"{waiting} requests wait, the queue holds {self.queue_limit}; a slot is free within {retry} s",
                retry_after_s=retry,
                waiting=waiting,
                queue_limit=self.queue_limit,
            )
