"""A scheduler in a world of its own: a fake pool that notices wrong rows, a clock, and answers known in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.sampler import Sampled, SamplingParams
from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Copy, Failed, Finished, Request, Sequence, Span, Started, Step, Token

GREEDY = SamplingParams(temperature=0.0)
END = 999  # the end token


@dataclass(frozen=True, slots=True)
class Windowed(KVLayout):
    """A layout whose bytes stop growing after `window` rows, as those of sliding-window layers do."""

    window: int = 10

    def committed(self, rows: int) -> int:
        return KVLayout.committed(self, min(rows, self.window))


class FakePool:
    """Row n of a slot is the token it was computed from, so computing on the rows of another prompt fails."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def run(self, step: Step) -> None:
        for move in step.moves:
            if isinstance(move, Copy):
                source = self.rows[move.source]
                assert move.rows <= len(source) and move.source != move.target
                self.rows[move.target] = source[: move.rows]
            else:
                del self.rows.setdefault(move.slot, [])[move.keep :]
        for span in step.spans:
            sequence = span.sequence
            assert sequence.slot is not None
            rows = self.rows.setdefault(sequence.slot, [])
            assert rows[: span.start] == sequence.tokens[: span.start], "computed on the rows of another prompt"
            rows[span.start :] = [*sequence.tokens[span.start : span.stop], *span.draft]
            assert len(rows) == span.stop


class World:
    """A scheduler with a fake pool and clock. `answers[id]`: tokens until the end token, of each choice.

    A page has four rows. sure: prompt rows that the timeline counts on in each step, of `chunk`. A step takes a second,
    and row_s for each row. word: the token at a position.
    """

    def __init__(
        self,
        layout: KVLayout | None = None,
        slots: int = 4,
        pages: int = 24,
        chunk: int = 5,
        *,
        sure: int | None = None,
        row_s: float = 0.0,
        word: Callable[[int], int] = int,
        **scheduler: Any,
    ) -> None:
        self.layout = layout or KVLayout(1, 1, 256, 56)
        self.pool = FakePool()
        rule = scheduler.pop("rule", "peak")
        self.ledger = KVLedger(self.layout, slots, pages * 8192)
        self.scheduler = Scheduler(Admission(self.ledger, rule, sure or chunk), chunk, **scheduler)
        self.now, self.row_s, self.word = 0.0, row_s, word
        self.answers: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.started: set[tuple[str, int]] = set()
        self.text: dict[tuple[str, int], list[int]] = {}

    def submit(self, id: str, prompt: list[int], max_tokens: int, answer: int = 10**6, **fields: Any) -> None:
        request = Request(id, tuple(prompt), max_tokens, GREEDY, frozenset({END}), **fields)
        self.answers[id], self.prompts[id] = answer, len(prompt)
        self.scheduler.submit(request, self.now)

    def step(self, bad: bool = False) -> Step:
        """One plan, run and commit. bad: the first outcome is an error."""
        step = self.scheduler.plan(self.now)
        self.take(step.events)
        self.pool.run(step)
        self.now += 1.0 + self.row_s * step.rows
        outcomes = [outcome for span in step.spans if span.samples for outcome in self.outcomes(span)]
        if bad and outcomes:
            outcomes[0] = ArithmeticError("NaN")
        self.take(self.scheduler.commit(step, outcomes, self.now))
        ledger = self.ledger
        for slot, rows in [*((slot, a.rows) for slot, a in ledger.allocations.items()), *ledger.cached.items()]:
            assert self.layout.committed(rows) == self.layout.committed(len(self.pool.rows.get(slot, ())))
        return step

    def outcomes(self, span: Span) -> list[Sampled | Exception]:
        """What a span samples, and each of its draft tokens as long as those before it are right."""
        outcomes: list[Sampled | Exception] = [Sampled(self.token(span.sequence, 0))]
        for at, token in enumerate(span.draft):
            last = outcomes[-1]
            right = isinstance(last, Sampled) and last.token_id == token
            outcomes.append(
                Sampled(self.token(span.sequence, at + 1)) if right else KeyError("after a wrong draft token")
            )
        return outcomes

    def token(self, sequence: Sequence, ahead: int) -> int:
        over = sequence.generated + ahead + 1 >= self.answers[sequence.request.id]
        return END if over else self.word(len(sequence.tokens) + ahead)

    def take(self, events: Any) -> None:
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.ended, "nothing comes after the end"
            if isinstance(event, Started):
                assert key not in self.started
                self.started.add(key)
            elif isinstance(event, Token):
                assert key in self.started
                text = self.text.setdefault(key, [])
                assert event.token_id in (END, self.word(self.prompts[event.request_id] + len(text)))
                text.append(event.token_id)
                assert (event.token_id == END) == (len(text) == self.answers[event.request_id])
            elif isinstance(event, Finished | Failed):
                self.ended[key] = event.reason if isinstance(event, Finished) else "failed"

    def drain(self, steps: int = 5000) -> None:
        """Runs until everything has ended, within `steps`."""
        for _ in range(steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError(f"still there: {self.scheduler.running} {self.scheduler.waiting}")
