"""All open streams: tokenises and admits requests, and routes the engine's events to their streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenteller.model.grammar import Grammar, GrammarError, Grammars, Kind
from tokenteller.model.sampler import SamplingParams
from tokenteller.model.tokenizer import Tokenizer
from tokenteller.server.api.admission import QueueLimits, fitting_max_tokens
from tokenteller.server.api.stream import Stream
from tokenteller.server.engine.engine import Engine
from tokenteller.server.engine.sequence import Event, Request, Token
from tokenteller.server.errors import BadGrammar, EngineFailure, Unavailable, Unprocessable
from tokenteller.server.metrics import Metrics
from tokenteller.server.text.choice import ChoiceText

log = logging.getLogger("tokenteller")

BUFFER_TOKENS = 256  # a client may lag this far behind before its sequence is paused
LONG_TEXT = 4096  # characters; tokenising more on the event loop would stall the other streams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an endpoint asks for. Milliseconds count from `arrived`; for the rest see engine.sequence.Request."""

    id: str
    prompt: str | Sequence[int]
    max_tokens: int | None
    sampling: SamplingParams
    n: int = 1
    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: tuple[Kind, str] | None = None
    priority: int = 0
    deadline_ms: int | None = None
    max_queue_ms: int | None = None
    cache_prefix: bool = True
    cache_salt: str = ""
    default_max_tokens: int = 128
    operation: str = "text_completion"  # OpenTelemetry's gen_ai.operation.name; or "chat"
    arrived: float = field(default_factory=time.monotonic)


class Streams:
    """The registry of open streams. Used on the event loop only."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        slow_reader_s: float,
        queue_limits: QueueLimits,
        buffer_tokens: int = BUFFER_TOKENS,
        model_name: str = "",
        metrics: Metrics | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.model_name = model_name
        self.metrics = metrics or Metrics()
        self.ended: str | None = None  # why no event will ever come again
        self.stuck: str | None = None  # why no event comes at the moment
        self.drain_until: float | None = None  # monotonic; set when shutdown begins
        self.closing = False  # the sockets are about to close: viewers of /pool must leave
        self._slow_reader_s = slow_reader_s
        self._queue_limits = queue_limits
        self.buffer_tokens = buffer_tokens
        self._grammars = Grammars(tokenizer, vocab_size)
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, asked: GenerationRequest) -> Stream:
        """Tokenises the prompt, admits the request and submits it to the engine. Raises ApiError."""
        request = await self._tokenized(asked)
        self.check_ready()
        self._queue_limits.check(self._open.values(), self.engine.status, len(request.prompt))
        stream = Stream(
            request,
            [self._choice(index, request, asked.stops) for index in range(request.n)],
            self.engine,
            self.metrics,
            operation=asked.operation,
            model_name=self.model_name,
            arrived=asked.arrived,
            buffer_tokens=self.buffer_tokens,
            slow_reader_s=self._slow_reader_s,
            on_close=self._forget,
        )
        self._open[request.id] = stream  # before it is submitted: events must find it
        self.engine.submit(request)
        return stream

    async def _tokenized(self, asked: GenerationRequest) -> Request:
        prompt = await self._prompt_ids(asked.prompt)
        self.check_ids("stop_token_ids", asked.stop_token_ids)
        self.check_ids("logit_bias", (id for id, _ in asked.sampling.logit_bias))
        ledger = self.engine.scheduler.ledger
        max_tokens = fitting_max_tokens(ledger, len(prompt), asked.max_tokens, asked.default_max_tokens)
        min_tokens = asked.sampling.min_tokens
        if min_tokens > max_tokens:
            raise Unprocessable(
                f"min_tokens: {min_tokens} exceeds max_tokens, which is {max_tokens}", param="min_tokens"
            )
        eos_ids = frozenset[int]() if asked.ignore_eos else self.tokenizer.stop_ids
        return Request(
            id=asked.id,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=asked.sampling,
            n=asked.n,
            grammar=None if asked.grammar is None else await self._compiled(*asked.grammar),
            stop_ids=frozenset(asked.stop_token_ids) | eos_ids,
            priority=asked.priority,
            deadline=_after(asked.arrived, asked.deadline_ms),
            start_by=_after(asked.arrived, asked.max_queue_ms),
            cache_prefix=asked.cache_prefix,
            cache_salt=asked.cache_salt,
        )

    async def _prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            self.check_ids("prompt", prompt)
            ids: Sequence[int] = prompt
        elif len(prompt) > LONG_TEXT:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            ids = self.tokenizer.encode(prompt)
        if not ids:
            raise Unprocessable("prompt: it has no tokens", param="prompt")
        return tuple(ids)

    async def _compiled(self, kind: Kind, text: str) -> Grammar:
        try:
            return await asyncio.to_thread(self._grammars.compile, kind, text)
        except GrammarError as error:
            raise BadGrammar(f"{kind}: {error}", param=kind) from None

    def _choice(self, index: int, request: Request, stops: Sequence[str]) -> ChoiceText:
        return ChoiceText(
            index,
            # a grammar has counted every byte, so none may be stripped
            self.tokenizer.detokenizer(strip_space=request.grammar is None),
            stops=stops,
            end_ids=request.stop_ids,
            min_tokens=request.sampling.min_tokens,
        )

    def check_ids(self, field: str, ids: Iterable[int]) -> None:
        """Raises Unprocessable, naming `field`, for a token id outside the vocabulary."""
        outside = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if outside is not None:
            raise Unprocessable(f"{field}: token id {outside} is not in 0..{self.vocab_size - 1}", param=field)

    def check_ready(self) -> None:
        """Raises Unavailable while draining, or when the engine is dead or stuck."""
        if self.drain_until is not None:
            left = max(1, round(self.drain_until - time.monotonic()))
            raise Unavailable("the server is draining and will shut down", retry_after_s=left)
        reason = self.unhealthy()
        if reason:
            raise Unavailable(reason, retry_after_s=5)

    def unhealthy(self) -> str | None:
        """Why the engine generates nothing, if it is dead or stuck."""
        return self.ended or (None if self.engine.alive else "the engine is not running") or self.stuck

    def find(self, id: str) -> Stream | None:
        """An open stream by its own id, or by the client's X-Request-Id."""
        return self._open.get(id) or next((s for s in self._open.values() if s.client_id == id), None)

    def waited_s(self, request_id: str) -> float | None:
        """Seconds since an open request arrived."""
        stream = self._open.get(request_id)
        return None if stream is None else round(time.monotonic() - stream.arrived, 3)

    def deliver(self, events: list[Event]) -> None:
        """Takes the events of one step."""
        self.metrics.tokens(sum(type(event) is Token for event in events))
        for event in events:
            stream = self._open.get(event.request_id)
            if stream is None:
                continue
            try:
                stream.receive(event)
            except Exception as error:  # must not cost the other streams their events
                log.exception("a stream failed")
                stream.fail(EngineFailure(f"the server failed on this stream with {type(error).__name__}"))

    def end_all(self, reason: str) -> None:
        """No more events will come: fails every stream and refuses new ones."""
        self.ended = reason
        self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """Fails every stream."""
        for stream in list(self._open.values()):
            stream.fail(EngineFailure(reason))

    def finish_all(self, reason: str) -> None:
        """Ends every stream with finish reason `reason`."""
        for stream in list(self._open.values()):
            stream.finish(reason)

    def _forget(self, stream: Stream) -> None:
        """The stream is closed; whatever of it still runs in the engine is cancelled."""
        if self._open.pop(stream.request.id, None) is not None:
            self.engine.cancel(stream.request.id)


def _after(moment: float, milliseconds: int | None) -> float | None:
    return None if milliseconds is None else moment + milliseconds / 1000
