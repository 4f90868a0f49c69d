"""The event-loop side of one request: detokenise, match stop strings, bound the buffer, cancel on close."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from tokenteller.model.grammar import Grammar, GrammarError, Grammars, Kind
from tokenteller.model.kv_memory import rows_max
from tokenteller.model.sampler import Logprobs, SamplingParams
from tokenteller.model.tokenizer import Tokenizer
from tokenteller.server import logs, tracing
from tokenteller.server.engine.engine import Engine
from tokenteller.server.engine.sequence import Event, Failed, Finished, Request, Reused, Started, Token
from tokenteller.server.engine.waiting import progress
from tokenteller.server.errors import (
    ApiError,
    BadGrammar,
    EngineFailure,
    NeverFits,
    QueueFull,
    SlowReader,
    Unavailable,
    Unprocessable,
)
from tokenteller.server.metrics import Metrics, Served

log = logging.getLogger("tokenteller")

SILENCE_S = 10.0  # after so long without a frame, a comment is sent
FIRST_S, WAITING_S = 0.05, 1.0  # and earlier while a request waits for its slot: at first, and then


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token and where its text begins, in characters of the choice's whole text."""

    token_id: int
    offset: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of one choice that is ready, and the tokens that begin in it; at the end also those that are left."""

    index: int
    text: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The one end of a choice that went well."""

    index: int
    reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing happened for a while; `comment` tells what it waits for."""

    comment: str


Item = Started | Delta | End | Silence


class StopMatcher:
    """Finds the stop string that begins first in a text that comes in pieces; holds back only what may become one.

    Each stop string is followed by its own automaton (Knuth, Morris & Pratt 1977), so a character costs the same
    whatever came before it. A match is final once no stop string that began before it can still be completed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._lengths = [0] * len(stops)  # of each stop string, how many characters the text ends with
        self._held = ""
        self._match: int | None = None  # where in the held text a complete match begins

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string was completed (then it ends before the match)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            open_since = self._step(text[end - 1], end)
            if self._match is not None and self._match <= open_since:
                return self._finish(text)
        safe = len(text) - max(self._lengths)
        if self._match is not None:
            self._match -= safe
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> tuple[str, bool]:
        """What was held back, now that nothing more comes; a complete match in it still counts."""
        return self._finish(self._held)

    def _step(self, char: str, end: int) -> int:
        """Takes one character; where the earliest stop string begins that is not yet complete."""
        open_since = end
        for at, (stop, borders) in enumerate(self._stops):
            length = self._lengths[at]
            while length and stop[length] != char:
                length = borders[length]
            length += stop[length] == char
            if length == len(stop):
                begin = end - length
                self._match = begin if self._match is None else min(self._match, begin)
                length = borders[length]
            self._lengths[at] = length
            open_since = min(open_since, end - length)
        return open_since

    def _finish(self, text: str) -> tuple[str, bool]:
        match, self._match, self._held = self._match, None, ""
        return (text, False) if match is None else (text[:match], True)


def _borders(stop: str) -> list[int]:
    """borders[n]: length of the longest proper end of stop[:n] that is also its beginning."""
    borders = [0, 0]
    for n in range(1, len(stop)):
        length = borders[n]
        while length and stop[length] != stop[n]:
            length = borders[length]
        borders.append(length + (stop[length] == stop[n]))
    return borders


class Choice:
    """The text of one choice, from tokens to what may be sent."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: Request, stops: Sequence[str]) -> None:
        self.index = index
        self.end: End | None = None
        self.completion_tokens = 0
        self.last_token_at: float | None = None
        self.pending: deque[Piece] = deque()
        self._pending_text = ""
        self._decoded = 0  # characters of all tokens so far
        self._released = 0  # characters that may be sent, or were
        self._end_ids = request.stop_ids
        self._min_tokens = request.sampling.min_tokens
        # a grammar has seen every byte, so none may be left out
        self._detokenizer = tokenizer.detokenizer(strip_space=request.grammar is None)
        self._stops = StopMatcher(stops)

    def take(self, token: Token) -> None:
        """One more token; ends the choice where it completes a stop string."""
        self.completion_tokens += 1
        self.pending.append(Piece(token.token_id, self._decoded, token.logprobs))
        if token.token_id not in self._end_ids:  # an end token is no part of the text
            self._append(self._detokenizer.push(token.token_id))

    def finish(self, reason: str) -> None:
        """No more tokens: what was held back is sent; a stop string that is complete by then is the reason."""
        stopped = self.flush()
        if self.end is None:
            self.end = End(self.index, "stop" if stopped else reason, self.completion_tokens)

    def flush(self) -> bool:
        """Releases what was held back, whatever the end is; whether it was cut by a stop string."""
        self._append(self._detokenizer.flush())
        text, stopped = self._stops.flush()
        self._release(text)
        return stopped

    def ready(self) -> Delta | None:
        """What can be sent now; tokens wait for the text that they begin, and go at the end at the latest."""
        if not self._pending_text and not (self.end and self.pending):
            return None
        pieces = []
        while self.pending and (self.end or self.pending[0].offset < self._released):
            pieces.append(self.pending.popleft())
        text, self._pending_text = self._pending_text, ""
        return Delta(self.index, text, tuple(pieces))

    def _append(self, piece: str) -> None:
        self._decoded += len(piece)
        if self.completion_tokens <= self._min_tokens:  # too early for an end
            self._release(piece)
            return
        text, stopped = self._stops.push(piece)
        self._release(text)
        if stopped:
            self.end = End(self.index, "stop", self.completion_tokens)

    def _release(self, text: str) -> None:
        self._pending_text += text
        self._released += len(text)


class Stream:
    """One request's events, from the engine to one reader. Lives on the event loop only."""

    def __init__(self, streams: Streams, request: Request, wanted: Wanted) -> None:
        self.request = request
        self.operation = wanted.operation
        self.arrived = wanted.arrived
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.started: Started | None = None
        self.cached_tokens = 0
        self._streams = streams
        self._choices = [Choice(index, streams.tokenizer, request, wanted.stops) for index in range(request.n)]
        self._error: ApiError | None = None
        self._held_since: float | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._silent_at = math.inf  # by the loop's clock; 0: nothing happened until then
        self.client_id = logs.request_id.get()
        self._span = tracing.start(wanted.operation, streams.model_name, request)

    async def items(self) -> AsyncIterator[list[Item]]:
        """What happens, in order, as much at once as is ready: Started, then Deltas and an End per choice; Silence in
        between. Raises ApiError for a failure, after what was ready before it.
        """
        told_start, open_choices = False, list(self._choices)
        patience = FIRST_S
        try:
            while open_choices:
                silent = await self._silence(patience if self.started is None else SILENCE_S)
                error = self._error
                ready: list[Item] = []
                if self.started and not told_start:
                    told_start = True
                    ready.append(self.started)
                for choice in list(open_choices):
                    end = choice.end  # before what is ready, so that nothing comes after it
                    delta = choice.ready()
                    if delta:
                        ready.append(delta)
                    if end:
                        open_choices.remove(choice)
                        ready.append(end)
                if silent and not ready:
                    patience = WAITING_S
                    ready.append(Silence(await self._progress()))
                if ready:
                    yield ready
                self._release()
                if error and open_choices:
                    raise error
        finally:
            if self._alarm:
                self._alarm.cancel()

    async def _silence(self, patience_s: float) -> bool:
        """Waits until something has happened, or, which it returns, nothing has for so long. Never shorter than before:
        one alarm serves many waits, and is put off where it goes off too early."""
        loop = asyncio.get_running_loop()
        self._silent_at = loop.time() + patience_s
        if self._alarm is None:
            self._alarm = loop.call_at(self._silent_at, self._ring)
        await self._wake.wait()
        self._wake.clear()
        silent = self._silent_at == 0.0
        self._silent_at = math.inf
        return silent

    def _ring(self) -> None:
        loop, self._alarm = asyncio.get_running_loop(), None
        if self._silent_at <= loop.time():
            self._silent_at = 0.0
            self._wake.set()
        elif self._silent_at < math.inf:
            self._alarm = loop.call_at(self._silent_at, self._ring)

    async def _progress(self) -> str:
        """How the request stands, as the engine tells it if it does within a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                told = await asyncio.wrap_future(self._streams.engine.ask(lambda s, _: progress(s, self.request.id)))
                return told or "working"
        return "working"

    def receive(self, event: Event) -> None:
        """Takes one event of the engine."""
        choice = self._choices[event.index]
        if self._closed or choice.end:
            return
        match event:
            case Started():
                if self.started is None:
                    self.started_at, self.started = time.monotonic(), event
                    self.cached_tokens = event.cached_tokens
            case Reused(index=0, cached_tokens=cached):  # what siblings copy from the first is its own prompt
                self.cached_tokens = cached
            case Token():
                self._stamp(choice)
                choice.take(event)
                if choice.end:
                    self._streams.engine.cancel(self.request.id, choice.index)
            case Finished(reason=reason):
                choice.finish(reason)
            case Failed(message=message, blame=blame):
                self.fail(BadGrammar(f"the grammar: {message}") if blame == "request" else EngineFailure(message))
        if all(choice.end for choice in self._choices):
            self.close()
        elif sum(len(choice.pending) for choice in self._choices) >= self._streams.buffer_tokens:
            self._hold()
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error."""
        if not self._closed:
            self._error = error
            for choice in self._choices:
                if choice.end is None:
                    choice.flush()
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
        if not self._closed:
            self._closed = True
            self._streams.forget(self)
            served = self._served()
            self._streams.metrics.served(served)
            tracing.end(self._span, served)
            log.info("request", extra={"fields": {"request_id": self.client_id} | asdict(served)})

    def _stamp(self, choice: Choice) -> None:
        now, metrics = time.monotonic(), self._streams.metrics
        if choice.last_token_at is not None:
            metrics.gaps.observe(now - choice.last_token_at)
        choice.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
            metrics.first_token(len(self.request.prompt), self.request.cache_prefix, self.cached_tokens)

    def _served(self) -> Served:
        now, first, started_at = time.monotonic(), self.first_token_at, self.started_at
        last = max((choice.last_token_at for choice in self._choices if choice.last_token_at), default=None)
        without = "error" if self._error else "cancelled"
        return Served(
            id=self.request.id,
            operation=self.operation,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            max_tokens=self.request.max_tokens,
            reasons=tuple(choice.end.reason if choice.end else without for choice in self._choices),
            error=self._error.code if self._error else None,
            slot=self.started.slot if self.started else None,
            queued_s=started_at and started_at - self.arrived,
            ttft_s=first and first - self.arrived,
            prefill_s=first and started_at and first - started_at,
            decode_s=first and last and last - first,
            total_s=now - self.arrived,
        )

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
class Terms:
    """On which terms a request waits and runs; see Request. Milliseconds count from its arrival."""

    priority: int = 0
    deadline_ms: int | None = None
    max_queue_ms: int | None = None
    cache_prefix: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A generation as an endpoint asks for it."""

    id: str
    prompt: str | Sequence[int]
    max_tokens: int | None
    sampling: SamplingParams
    n: int = 1
    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: tuple[Kind, str] | None = None
    terms: Terms = Terms()
    default_max_tokens: int = 128
    operation: str = "text_completion"  # or "chat": OpenTelemetry's gen_ai.operation.name
    arrived: float = field(default_factory=time.monotonic)


class Streams:
    """All open streams. Decides at the door; hands the engine's events to whom they belong."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        buffer_tokens: int,
        slow_reader_s: float,
        queue_limit: int,
        queue_tokens: int = 2**20,
        model_name: str = "",
        metrics: Metrics | None = None,
    ) -> None:
        self.engine = engine
        self.model_name = model_name
        self.metrics = metrics or Metrics()
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.buffer_tokens = buffer_tokens
        self.slow_reader_s = slow_reader_s
        self.queue_limit = queue_limit
        self.queue_tokens = queue_tokens
        self.ended: str | None = None  # why no event will ever come again
        self.stuck: str | None = None  # why none comes now
        self.drain_until: float | None = None  # monotonic; set once the server was told to end
        self._grammars = Grammars(tokenizer, vocab_size)
        self.closing = False  # the sockets are about to close: who only looks on must leave
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, wanted: Wanted) -> Stream:
        """Tokenises, refuses what can never fit or has no place to wait, registers, submits. Raises ApiError."""
        prompt = await self._ids(wanted.prompt)
        self.check_ids("stop_token_ids", wanted.stop_token_ids)
        self.check_ids("logit_bias", (id for id, _ in wanted.sampling.logit_bias))
        max_tokens = self._max_tokens(len(prompt), wanted.max_tokens, wanted.default_max_tokens)
        if wanted.sampling.min_tokens > max_tokens:
            told = f"min_tokens: {wanted.sampling.min_tokens} is more than max_tokens, which is {max_tokens}"
            raise Unprocessable(told, param="min_tokens")
        grammar = None if wanted.grammar is None else await self._compile(*wanted.grammar)
        request = Request(
            id=wanted.id,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=wanted.sampling,
            n=wanted.n,
            grammar=grammar,
            stop_ids=frozenset(wanted.stop_token_ids) | (frozenset() if wanted.ignore_eos else self.tokenizer.stop_ids),
            priority=wanted.terms.priority,
            deadline=_after(wanted.arrived, wanted.terms.deadline_ms),
            start_by=_after(wanted.arrived, wanted.terms.max_queue_ms),
            cache_prefix=wanted.terms.cache_prefix,
            cache_salt=wanted.terms.cache_salt,
        )
        self._refuse_what_cannot_be_taken(len(prompt))
        stream = Stream(self, request, wanted)
        self._open[request.id] = stream  # registered before it is submitted, so that no event finds no stream
        self.engine.submit(request)
        return stream

    def deliver(self, events: list[Event]) -> None:
        """Events of one step."""
        self.metrics.tokens(sum(type(event) is Token for event in events))
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

    def waited_s(self, request_id: str) -> float | None:
        """Seconds since an open request arrived."""
        stream = self._open.get(request_id)
        return None if stream is None else round(time.monotonic() - stream.arrived, 3)

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
            self.check_ids("prompt", prompt)
            ids: Sequence[int] = prompt
        elif len(prompt) > 4096:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)  # a long text would stall the other streams
        else:
            ids = self.tokenizer.encode(prompt)
        if not ids:
            raise Unprocessable("prompt: it has no tokens", param="prompt")
        return tuple(ids)

    async def _compile(self, kind: Kind, text: str) -> Grammar:
        try:
            return await asyncio.to_thread(self._grammars.compile, kind, text)
        except GrammarError as error:
            raise BadGrammar(f"{kind}: {error}", param=kind) from None

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        outside = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if outside is not None:
            raise Unprocessable(f"{field}: token id {outside} is not in 0..{self.vocab_size - 1}", param=field)

    def _max_tokens(self, prompt_tokens: int, asked: int | None, default: int) -> int:
        """What was asked, or the default; refuses what neither the context nor the pool could ever hold."""
        ledger = self.engine.scheduler.ledger
        layout = ledger.layout
        context, tokens = layout.max_context, layout.tokens_that_fit(ledger.budget_bytes)
        most = max(0, tokens - prompt_tokens)
        wanted = min(default, most) if asked is None else asked
        if 1 <= wanted <= most:
            return wanted
        rows = rows_max(prompt_tokens, max(wanted, 1))
        needed = replace(layout, max_context=max(rows, context)).committed(rows)
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
            else f"shorten the prompt by {prompt_tokens - tokens + 1} tokens"
        )
        raise NeverFits(
            f"{told} and max_tokens is {max(wanted, 1)}, which needs {needed} bytes of K/V; {limit}: {remedy}",
            param="max_tokens" if most else "prompt",
            **numbers,
        )

    def find(self, id: str) -> Stream | None:
        """An open stream by our id for it, or by the client's own X-Request-Id."""
        return self._open.get(id) or next((s for s in self._open.values() if s.client_id == id), None)

    def _refuse_what_cannot_be_taken(self, prompt_tokens: int) -> None:
        self.check_open()
        status = self.engine.status
        waiting = [stream for stream in self._open.values() if stream.started is None]
        seats = 0 if status.waiting else status.free_slots  # for those that came since the last step
        tokens = sum(len(stream.request.prompt) for stream in waiting)
        over_tokens = len(waiting) > seats and tokens + prompt_tokens > self.queue_tokens
        if len(waiting) - seats < self.queue_limit and not over_tokens:
            return
        retry = max(1, math.ceil(status.next_start_s))
        bound = f"{self.queue_tokens} prompt tokens" if over_tokens else f"{self.queue_limit}"
        raise QueueFull(
            f"{len(waiting)} requests with {tokens} prompt tokens wait, the queue holds {bound}; "
            f"the next one leaves it within {retry} s",
            retry_after_s=retry,
            waiting=len(waiting),
            waiting_tokens=tokens,
            queue_limit=self.queue_limit,
            queue_tokens=self.queue_tokens,
        )


def _after(moment: float, milliseconds: int | None) -> float | None:
    return None if milliseconds is None else moment + milliseconds / 1000
