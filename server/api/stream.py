"""Delivers one request's events from the engine to its reader: bounds the buffer, cancels when the reader is gone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from tokenteller.server import logs, tracing
from tokenteller.server.engine.engine import Engine
from tokenteller.server.engine.sequence import Event, Failed, Finished, Request, Reused, Started, Token
from tokenteller.server.engine.waiting import progress
from tokenteller.server.errors import ApiError, BadGrammar, EngineFailure, SlowReader, Unavailable
from tokenteller.server.metrics import Metrics, Served
from tokenteller.server.text.choice import ChoiceText, Delta, End

log = logging.getLogger("tokenteller")

# Seconds without an event until a comment is sent: while waiting for a slot, first and then; and later.
FIRST_NOTICE_S, NOTICE_S, KEEP_ALIVE_S = 0.05, 1.0, 10.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Nothing has happened for a while. `comment` says what the request is waiting for."""

    comment: str


Item = Started | Delta | End | KeepAlive


class Stream:
    """One request on its way to one reader. Used on the event loop only."""

    def __init__(
        self,
        request: Request,
        choices: Sequence[ChoiceText],
        engine: Engine,
        metrics: Metrics,
        *,
        operation: str,
        model_name: str,
        arrived: float,
        buffer_tokens: int,
        slow_reader_s: float,
        on_close: Callable[[Stream], None],
    ) -> None:
        self.request = request
        self.operation = operation
        self.arrived = arrived
        self.client_id = logs.request_id.get()
        self.started: Started | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.cached_tokens = 0
        self._choices = choices
        self._last_token_at: list[float | None] = [None] * len(choices)
        self._engine = engine
        self._metrics = metrics
        self._buffer_tokens = buffer_tokens
        self._slow_reader_s = slow_reader_s
        self._on_close = on_close
        self._error: ApiError | None = None
        self._closed = False
        self._held_since: float | None = None
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until = math.inf  # loop time; 0 once it passed without an event
        self._span = tracing.start(operation, model_name, request)

    # The reader's side

    async def items(self) -> AsyncIterator[list[Item]]:
        """Batches of what happened, in order: Started, then Deltas and one End per choice, KeepAlives in between.

        Raises ApiError if the request fails, after everything that was ready before.
        """
        announced, unfinished = False, list(self._choices)
        notice_s = FIRST_NOTICE_S
        try:
            while unfinished:
                quiet = await self._quiet_for(notice_s if self.started is None else KEEP_ALIVE_S)
                error = self._error
                ready: list[Item] = []
                if self.started and not announced:
                    announced = True
                    ready.append(self.started)
                for choice in list(unfinished):
                    end = choice.end  # read before ready(), so that no text can follow the end
                    delta = choice.ready()
                    if delta:
                        ready.append(delta)
                    if end:
                        unfinished.remove(choice)
                        ready.append(end)
                if quiet and not ready:
                    notice_s = NOTICE_S
                    ready.append(KeepAlive(await self._progress()))
                if ready:
                    yield ready
                self._resume()
                if error and unfinished:
                    raise error
        finally:
            if self._timer:
                self._timer.cancel()

    async def _quiet_for(self, seconds: float) -> bool:
        """Waits for an event. Returns True if none came within `seconds`.

        A timer per token would cost more than the token, so one timer serves many waits and re-arms when it fires too
        early. That needs `seconds` never to shrink from call to call.
        """
        loop = asyncio.get_running_loop()
        self._quiet_until = loop.time() + seconds
        if self._timer is None:
            self._timer = loop.call_at(self._quiet_until, self._on_timer)
        await self._wake.wait()
        self._wake.clear()
        quiet = self._quiet_until == 0.0
        self._quiet_until = math.inf
        return quiet

    def _on_timer(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        if self._quiet_until <= loop.time():
            self._quiet_until = 0.0
            self._wake.set()
        elif self._quiet_until < math.inf:
            self._timer = loop.call_at(self._quiet_until, self._on_timer)

    async def _progress(self) -> str:
        """What the request is doing, if the engine answers within a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                answer = self._engine.ask(lambda scheduler, _: progress(scheduler, self.request.id))
                return await asyncio.wrap_future(answer) or "working"
        return "working"

    # The engine's side

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
            case Reused(index=0, cached_tokens=cached):  # further choices copy the first one's prompt: not a cache hit
                self.cached_tokens = cached
            case Token():
                self._note_token(event.index)
                choice.add(event.token_id, event.logprobs)
                if choice.end:
                    self._engine.cancel(self.request.id, choice.index)
            case Finished(reason=reason):
                choice.finish(reason)
            case Failed(message=message, blame=blame):
                self.fail(BadGrammar(f"the grammar: {message}") if blame == "request" else EngineFailure(message))
        if all(choice.end for choice in self._choices):
            self.close()
        elif sum(len(choice.pending) for choice in self._choices) >= self._buffer_tokens:
            self._hold()
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error, after the text that was generated."""
        if not self._closed:
            self._error = error
            for choice in self._choices:
                if choice.end is None:
                    choice.flush()
            self.close()
            self._wake.set()

    def finish(self, reason: str) -> None:
        """Ends all unfinished choices with `reason`. A stream that never got a slot fails instead."""
        if self.started is None:
            self.fail(Unavailable("the server shut down before the request got a slot; retry", retry_after_s=1))
            return
        for choice in self._choices:
            choice.finish(reason)
        self.close()
        self._wake.set()

    def close(self) -> None:
        """Everything has been received, or the reader is gone. May be called at any time, and again."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            served = self._served()
            self._metrics.served(served)
            tracing.end(self._span, served)
            log.info("request", extra={"fields": {"request_id": self.client_id} | asdict(served)})

    def _note_token(self, index: int) -> None:
        now, last = time.monotonic(), self._last_token_at[index]
        if last is not None:
            self._metrics.gaps.observe(now - last)
        self._last_token_at[index] = now
        if self.first_token_at is None:
            self.first_token_at = now
            self._metrics.first_token(len(self.request.prompt), self.request.cache_prefix, self.cached_tokens)

    def _served(self) -> Served:
        now, first, started_at = time.monotonic(), self.first_token_at, self.started_at
        last = max((at for at in self._last_token_at if at), default=None)
        unfinished = "error" if self._error else "cancelled"
        return Served(
            id=self.request.id,
            operation=self.operation,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            max_tokens=self.request.max_tokens,
            reasons=tuple(choice.end.reason if choice.end else unfinished for choice in self._choices),
            error=self._error.code if self._error else None,
            slot=self.started.slot if self.started else None,
            queued_s=started_at and started_at - self.arrived,
            ttft_s=first and first - self.arrived,
            prefill_s=first and started_at and first - started_at,
            decode_s=first and last and last - first,
            total_s=now - self.arrived,
        )

    # Back-pressure

    def _hold(self) -> None:
        """Pauses the sequence of a reader that has fallen behind, and gives up on it after `slow_reader_s`."""
        if self._held_since is None:
            self._held_since = time.monotonic()
            self._engine.hold(self.request.id, True)
            asyncio.get_running_loop().call_later(self._slow_reader_s, self._give_up, self._held_since)

    def _resume(self) -> None:
        if self._held_since is not None:
            self._held_since = None
            if not self._closed:
                self._engine.hold(self.request.id, False)

    def _give_up(self, held_since: float) -> None:
        if self._held_since == held_since:
            self.fail(SlowReader(f"the client read nothing for {self._slow_reader_s:g} s"))
