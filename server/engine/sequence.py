"""What travels through the engine: Request, Sequence, Step, Event. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from tokenteller.model.grammar import Grammar, Matcher
from tokenteller.model.kv_memory import rows_max
from tokenteller.model.sampler import Logprobs, SamplingParams
from tokenteller.server.engine.demand import Demand
from tokenteller.server.engine.ledger import Allocation
from tokenteller.server.engine.prompt_lookup import PromptLookup

NEVER = sys.maxsize  # a step that does not come


@dataclass(frozen=True, slots=True)
class Request:
    """What the client asked for, tokenised."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    n: int = 1
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds of the engine's clock: it must have ended by then,
    start_by: float | None = None  # and have its first slot by then
    cache_prefix: bool = True
    cache_salt: str = ""
    grammar: Grammar | None = None

    @property
    def rows_max(self) -> int:
        """The most rows one choice can need."""
        return rows_max(len(self.prompt), self.max_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. It has no phases: `computed` catches up with `len(tokens)`.

    tokens    [ prompt ........ | generated .... ]
    rows      [ computed, K/V in the pool | to do ]
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(init=False)
    max_length: int = field(init=False)  # of prompt and output, in tokens
    computed: int = 0
    slot: int | None = None
    matcher: Matcher | None = field(init=False)  # its position in the grammar
    prompt_lookup: PromptLookup | None = None
    # while it waits
    order: tuple[float, int] = (0.0, 0)  # its place in the queue
    reservation: Demand | None = None
    bypassed: int = 0  # how many later ones were let in before it
    tried: int = -1  # the queue's `released` count when it last did not fit
    # while it runs
    allocation: Allocation | None = None
    decodes_from: int = NEVER  # the step from which on its demand has it decode a row at each step
    held: bool = False  # its reader has fallen behind
    source: Sequence | None = None  # the sequence now computing the first `shared` rows of its prompt
    shared: int = 0
    cached: int = 0  # rows it did not have to compute

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.max_length = len(self.tokens) + self.request.max_tokens
        self.matcher = self.request.grammar.start() if self.request.grammar else None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True)
class Span:
    """Positions start..stop-1 of one sequence, to compute now; the last of them hold its draft tokens, if any."""

    sequence: Sequence
    start: int
    stop: int
    draft: Seq[int] = ()

    @property
    def samples(self) -> bool:
        """Whether the span reaches the last known token, so that one token is sampled, and one more per draft token."""
        return self.stop >= len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence has its slot; `cached_tokens` of its prompt need not be computed."""

    request_id: str
    index: int
    slot: int
    held_bytes: int
    max_bytes: int
    cached_tokens: int = 0
    first_token_s: float = 0.0  # estimate of the time to its first token


@dataclass(slots=True)  # not frozen: that would double the cost of what is made thousands of times a second
class Token:
    request_id: str
    index: int
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended normally: 'stop', 'length' or 'deadline'."""

    request_id: str
    index: int
    reason: str


Blame = Literal["server", "request"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence ended by an error: of server or model, or, with `blame` on the request, of its grammar."""

    request_id: str
    index: int
    message: str
    blame: Blame = "server"


@dataclass(frozen=True, slots=True)
class Reused:
    """After its start, `cached_tokens` of a sequence's prompt were copied from one that had just computed them."""

    request_id: str
    index: int
    cached_tokens: int


Event = Started | Token | Finished | Failed | Reused


@dataclass(frozen=True, slots=True)
class Release:
    """Release the pages of a slot, except those of its first `keep` rows."""

    slot: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `rows` rows of a slot to another."""

    source: int
    target: int
    rows: int


@dataclass(slots=True)
class Step:
    """What to do now: the moves in the pool, in order; then all spans in one forward pass."""

    moves: tuple[Release | Copy, ...]
    spans: tuple[Span, ...]
    events: tuple[Event, ...]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum([span.stop - span.start for span in self.spans])
