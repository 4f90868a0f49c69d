"""What travels through the engine: Request, Sequence, Step, Event. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from tokenteller.model.grammar import Grammar, Matcher
from tokenteller.model.kv_memory import rows_max
from tokenteller.model.sampler import Logprobs, SamplingParams
from tokenteller.server.engine.guess import Guesser
from tokenteller.server.engine.ledger import Account, Plan

NEVER = sys.maxsize  # a step that does not come


@dataclass(frozen=True, slots=True)
class Request:
    """What the client asked, already in tokens."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    n: int = 1
    priority: int = 0  # lower goes first
    deadline: float | None = None  # both in seconds of the engine's clock: when it must have ended,
    start_by: float | None = None  # and when it must have got its first slot
    cache_prefix: bool = True
    cache_salt: str = ""
    grammar: Grammar | None = None

    @property
    def rows_max(self) -> int:
        """Rows that one choice can ever need."""
        return rows_max(len(self.prompt), self.max_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request while it runs. There are no phases: `computed` catches up with `len(tokens)`.

    tokens    [ prompt ........ | generated .... ]
    rows      [ computed, K/V in the pool | to do ]
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(init=False)
    computed: int = 0
    slot: int | None = None
    account: Account | None = None  # what the ledger lends it, while it runs
    paced: int = NEVER  # the step from which on it decodes a row each step, as planned
    longest: int = field(init=False)  # tokens that it ends with at the latest
    held: bool = False  # its reader has fallen behind
    plan: Plan | None = None  # while it waits: what was booked for it
    order: tuple[float, int] = (0.0, 0)  # its place among those that wait
    tried: int = -1  # what had come free when it was last tried in vain
    passed: int = 0  # how many from behind have been let in before it
    source: Sequence | None = None  # who computes `shared` rows of its prompt just now
    shared: int = 0
    cached: int = 0  # rows that it did not have to compute
    matcher: Matcher | None = field(init=False)  # where it stands in its grammar
    guesser: Guesser | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.longest = len(self.tokens) + self.request.max_tokens
        self.matcher = self.request.grammar.start() if self.request.grammar else None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True)
class Span:
    """Positions start..stop-1 of one sequence, to be computed now; at the last of them stand `guesses`, if any."""

    sequence: Sequence
    start: int
    stop: int
    guesses: Seq[int] = ()

    @property
    def samples(self) -> bool:
        """Whether the span reaches the end of what is known, so that a token comes out of it, and of each guess."""
        return self.stop >= len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence got its slot; `cached_tokens` of its prompt need not be computed."""

    request_id: str
    index: int
    slot: int
    held_bytes: int
    max_bytes: int
    cached_tokens: int = 0
    first_token_s: float = 0.0  # what it will take until its first token, as it seems


@dataclass(slots=True)  # not frozen: there are thousands a second, and freezing makes them twice as slow
class Token:
    """One generated token."""

    request_id: str
    index: int
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended as it should: 'stop', 'length' or 'deadline'."""

    request_id: str
    index: int
    reason: str


Blame = Literal["server", "request"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence ended by a fault of the server or the model, or, with `blame` on the request, of its grammar."""

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
    """Hand back the pages of a slot, but for those of its first `keep` rows."""

    slot: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `rows` rows of one slot to another."""

    source: int
    target: int
    rows: int


@dataclass(slots=True)
class Step:
    """What to do now: first the moves in the pool, one after another, then compute all spans at once."""

    moves: tuple[Release | Copy, ...]
    spans: tuple[Span, ...]
    events: tuple[Event, ...]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum([span.stop - span.start for span in self.spans])
