"""The scheduler over random histories: all that is admitted ends, nobody waits longer than told, no row lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.kv_memory import KVLayout
from model.sampler import Sampled, SamplingParams
from server.engine.ledger import KVLedger
from server.engine.scheduler import Scheduler
from server.engine.sequence import Copy, Failed, Finished, Request, Sequence, Started, Step, Token

GREEDY = SamplingParams(temperature=0.0)
END = 999  # the end token
EXAMPLES = int(os.environ.get("TOKENTELLER_EXAMPLES", "100"))


@dataclass(frozen=True, slots=True)
class Windowed(KVLayout):
    """A layout whose bytes stop growing after `window` rows, as sliding-window layers do."""

    window: int = 10

    def committed(self, rows: int) -> int:
        return KVLayout.committed(self, min(rows, self.window))


class FakePool:
    """Rows as values: row n of a slot is the tokens that it depends on. Computing on wrong rows fails."""

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
            rows[span.start :] = sequence.tokens[span.start : span.stop]


class World:
    """A scheduler with a fake pool and clock. `answers[id]`: tokens until the end token, of each choice."""

    def __init__(
        self, layout: KVLayout | None = None, slots: int = 4, pages: int = 24, chunk: int = 5, **scheduler: Any
    ) -> None:
        # one lane, four rows a page
        self.layout = layout or KVLayout(1, 1, 256, 40)
        self.pool = FakePool()
        rule = scheduler.pop("rule", "peak")
        self.ledger = KVLedger(self.layout, slots, pages * 8192, rule, chunk)
        self.scheduler = Scheduler(self.ledger, chunk, **scheduler)
        self.now = 0.0
        self.answers: dict[str, int] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.started: set[tuple[str, int]] = set()
        self.text: dict[tuple[str, int], list[int]] = {}

    def submit(self, id: str, prompt: list[int], max_tokens: int, answer: int = 10**6, **fields: Any) -> None:
        request = Request(id, tuple(prompt), max_tokens, GREEDY, frozenset({END}), **fields)
        self.answers[id] = answer
        self.scheduler.submit(request, self.now)

    def step(self, bad: bool = False) -> Step:
        """One plan, run and commit. bad: the first outcome is a failure."""
        step = self.scheduler.plan(self.now)
        self.take(step.events)
        self.pool.run(step)
        self.now += 1.0
        outcomes: list[Sampled | Exception] = [self.outcome(span.sequence) for span in step.spans if span.samples]
        if bad and outcomes:
            outcomes[0] = ArithmeticError("NaN")
        self.take(self.scheduler.commit(step, outcomes, self.now))
        return step

    def outcome(self, sequence: Sequence) -> Sampled:
        over = sequence.generated + 1 >= self.answers[sequence.request.id]
        return Sampled(END if over else len(sequence.tokens))

    def take(self, events: Any) -> None:
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.ended, "nothing comes after the end"
            if isinstance(event, Started):
                assert key not in self.started
                self.started.add(key)
            elif isinstance(event, Token):
                assert key in self.started
                self.text.setdefault(key, []).append(event.token_id)
            elif isinstance(event, Finished | Failed):
                self.ended[key] = event.reason if isinstance(event, Finished) else "failed"

    def drain(self, steps: int = 5000) -> None:
        """Runs until nothing is left; everything must end within `steps`."""
        for _ in range(steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError(f"still there: {self.scheduler.running} {self.scheduler.waiting}")


PROMPTS = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.sampled_from([1, 2]),
    st.integers(0, 24),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
)


class History(RuleBasedStateMachine):
    """Arrivals, steps, ends, failures, cancels, slow readers, deadlines and shared prefixes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.told: dict[tuple[str, int], int] = {}  # the first step that was told as the latest
        self.excused = False  # a reader was slow: what had been told before no longer holds

    @initialize(
        windowed=st.booleans(),
        slots=st.integers(1, 5),
        pages=st.integers(10, 30),
        chunk=st.integers(1, 8),
        bypass=st.integers(0, 3),
        rule=st.sampled_from(["peak", "peak", "reserve"]),
    )
    def begin(self, windowed: bool, slots: int, pages: int, chunk: int, bypass: int, rule: str) -> None:
        layout = Windowed(1, 1, 256, 40) if windowed else KVLayout(1, 1, 256, 40)
        self.world = World(layout, slots, pages, chunk, bypass_limit=bypass, rule=rule)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        answer=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 6]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        patience=st.sampled_from([None, None, 3.0, 40.0]),
        limit=st.sampled_from([None, None, 5.0, 60.0]),
        cache=st.sampled_from([True, True, False]),
        salt=st.sampled_from(["", "", "other"]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        answer: int,
        n: int,
        priority: int,
        patience: float | None,
        limit: float | None,
        cache: bool,
        salt: str,
    ) -> None:
        id = str(len(self.ids))
        self.ids.append(id)
        now = self.world.now
        self.world.submit(
            id,
            prompt,
            max_tokens,
            answer,
            n=n,
            priority=priority,
            start_by=None if patience is None else now + patience,
            deadline=None if limit is None else now + limit,
            cache_prefix=cache,
            cache_salt=salt,
        )

    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.world.step()
            self.laws()

    @rule()
    def poisoned_step(self) -> None:
        self.world.step(bad=True)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), index=st.sampled_from([None, 0, 1]))
    def cancel(self, data: st.DataObject, index: int | None) -> None:
        self.world.scheduler.cancel(data.draw(st.sampled_from(self.ids)), index)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), held=st.booleans())
    def hold(self, data: st.DataObject, held: bool) -> None:
        self.excused |= held
        self.world.scheduler.hold(data.draw(st.sampled_from(self.ids)), held)

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        scheduler.check()
        clock = scheduler.ledger.timetable.now
        for sequence in scheduler.waiting:
            assert sequence.passed <= scheduler.bypass_limit
            key = (sequence.request.id, sequence.index)
            assert sequence.plan is not None
            told = self.told.setdefault(key, sequence.plan.begin)
            assert self.excused or max(clock, sequence.plan.begin) <= told, "later than told"
        assert self.excused or not scheduler.counts.postponed

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for id in self.ids:
            self.world.scheduler.hold(id, False)
        self.world.drain()
        self.laws()
        scheduler = self.world.scheduler
        assert not scheduler._by_id and not scheduler.held
        assert not scheduler.ledger.lent_bytes and scheduler.ledger.free_slots == scheduler.ledger.slots


History.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistory = History.TestCase
