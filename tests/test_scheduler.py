"""The scheduler over random histories: all that is admitted ends, nobody waits longer than told, no row lies."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.sampler import Sampled, SamplingParams
from tokenteller.server.engine.ledger import BYTES, KVLedger
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import (
    Copy,
    Failed,
    Finished,
    Release,
    Request,
    Sequence,
    Span,
    Started,
    Step,
    Token,
)
from tokenteller.server.engine.why import request_state

GREEDY = SamplingParams(temperature=0.0)
END = 999  # the end token
EXAMPLES = int(os.environ.get("TOKENTELLER_EXAMPLES", "2000"))


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
            rows[span.start :] = [*sequence.tokens[span.start : span.stop], *span.guesses]
            assert len(rows) == span.stop


class World:
    """A scheduler with a fake pool and clock. `answers[id]`: tokens until the end token, of each choice.

    sure: prompt rows of each step that are planned for, of `chunk`. row_s: seconds that a row makes a step longer,
    which is one second at least. word: the token at a position.
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
        # one lane, four rows a page
        self.layout = layout or KVLayout(1, 1, 256, 56)
        self.pool = FakePool()
        rule = scheduler.pop("rule", "peak")
        self.ledger = KVLedger(self.layout, slots, pages * 8192, rule, sure or chunk)
        self.scheduler = Scheduler(self.ledger, chunk, **scheduler)
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
        """One plan, run and commit. bad: the first outcome is a failure."""
        step = self.scheduler.plan(self.now)
        self.take(step.events)
        self.pool.run(step)
        self.now += 1.0 + self.row_s * step.rows
        outcomes = [outcome for span in step.spans if span.samples for outcome in self.outcomes(span)]
        if bad and outcomes:
            outcomes[0] = ArithmeticError("NaN")
        self.take(self.scheduler.commit(step, outcomes, self.now))
        ledger = self.ledger
        for slot, rows in [*((slot, a.rows) for slot, a in ledger.accounts.items()), *ledger.resident.items()]:
            assert self.layout.committed(rows) == self.layout.committed(len(self.pool.rows.get(slot, ())))
        return step

    def outcomes(self, span: Span) -> list[Sampled | Exception]:
        """What comes out of a span, and of each of its guesses as long as those before it are right."""
        outcomes: list[Sampled | Exception] = [Sampled(self.token(span.sequence, 0))]
        for at, guess in enumerate(span.guesses):
            last = outcomes[-1]
            right = isinstance(last, Sampled) and last.token_id == guess
            outcomes.append(Sampled(self.token(span.sequence, at + 1)) if right else KeyError("after a wrong guess"))
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
        """Runs until nothing is left; everything must end within `steps`."""
        for _ in range(steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError(f"still there: {self.scheduler.running} {self.scheduler.waiting}")


def test_a_copy_comes_before_a_start_that_takes_the_slot_of_its_source() -> None:
    """One waits for rows of another that ends with the step that computes them; a third wants that one's slot."""
    world, shared = World(slots=2, chunk=20), list(range(20))
    world.submit("source", shared, 1)
    world.submit("follower", shared, 4)
    world.submit("third", [77] * 20, 4)
    first = world.step()
    assert [span.sequence.request.id for span in first.spans] == ["source"] and ("source", 0) in world.ended
    follower = world.scheduler.sequences("follower")[0]
    second = world.step()
    assert follower.cached == 19 and ("third", 0) in world.started
    assert [type(move) for move in second.moves] == [Copy, Release]
    world.drain()


def test_one_that_is_to_copy_computes_what_was_planned_for_it_all_the_same() -> None:
    """Its source was planned to compute the shared rows in the very step that is the follower's last."""
    world, shared = World(slots=3, chunk=6), list(range(21))
    world.submit("gives up", [77] * 24, 1)
    world.submit("source", shared, 1)
    world.step()
    world.scheduler.cancel("gives up")
    world.submit("follower", shared, 1)
    world.step()
    source, follower = (world.scheduler.sequences(id)[0] for id in ("source", "follower"))
    assert follower.source is source and follower.account and source.account
    assert follower.account.plan.ready == source.account.plan.end == 7
    for _ in range(6):
        world.scheduler.check()
        world.step()
    assert set(world.ended) == {("source", 0), ("follower", 0)}


def test_growth_waits_where_a_slow_reader_needs_the_last_page() -> None:
    """Ten pages. One of four may come to five; the other of four was to grow to nine once the first has ended.

    Under `peak` only a slow reader makes the plans clash: whoever is behind its plan for another reason (its source
    failed) has its own prompt rows booked after those of its source, and is in time.
    """
    world = World(slots=2, pages=10, chunk=32)
    world.submit("slow", [1] * 16, 5)
    world.submit("grows", [2] * 16, 21)
    world.step()
    world.scheduler.hold("slow", True)
    for _ in range(12):
        world.step()
        world.scheduler.check()
    slow, grows = world.scheduler.running
    assert (slow.computed, grows.computed) == (16, 20) and world.scheduler.counts.held_steps
    world.scheduler.hold("slow", False)
    world.drain()
    assert world.ended == {("slow", 0): "length", ("grows", 0): "length"}


def test_one_that_sat_out_an_empty_step_may_be_cancelled_after_it() -> None:
    world = World()
    world.submit("slow", [1] * 4, 8)
    world.submit("sits out", [2] * 4, 8)
    world.step()
    world.step()
    world.scheduler.hold("slow", True)
    must_wait = world.ledger.must_wait
    world.ledger.must_wait = set  # type: ignore[method-assign, assignment]
    steps = [world.step() for _ in range(5)]  # until it wants its next page
    assert not steps[-1].spans and world.scheduler.counts.held_steps
    world.ledger.must_wait = must_wait  # type: ignore[method-assign]
    world.scheduler.cancel("sits out")
    world.submit("next", [3] * 4, 2)
    world.step()
    world.scheduler.hold("slow", False)
    world.drain()
    world.scheduler.check()


def test_deadlines_of_those_that_have_ended_are_forgotten() -> None:
    world = World(slots=1)
    world.submit("long", [1], 50, deadline=1e6)
    for at in range(500):
        world.submit(str(at), [2], 5, deadline=1e9, start_by=1e9)
        world.scheduler.cancel(str(at))
        assert len(world.scheduler._timers) < 100
    assert world.scheduler.next_expiry() is not None
    world.drain()
    assert world.scheduler.next_expiry() is None


EIGHT_A_PAGE = KVLayout(1, 1, 128, 56)


def speculating(pages: int = 100, **settings: Any) -> World:
    return World(
        EIGHT_A_PAGE,
        pages=pages,
        chunk=24,
        speculate=8,
        **{"word": lambda position: position % 3, "row_s": 0.01} | settings,
    )


def test_what_is_guessed_right_comes_sooner_and_within_the_pages_of_the_row_before_it() -> None:
    world = speculating()
    world.submit("x", [0, 1, 2, 0, 1, 2, 0, 1], 40)
    spans = [span for _ in range(40) for span in world.step().spans]
    assert world.text["x", 0] == [position % 3 for position in range(8, 48)] and world.ended["x", 0] == "length"
    rows = [(span.start, span.stop) for span in spans]
    assert rows[0] == (0, 8) and rows[-1][1] == 47, "the last token is not fed back"
    assert all(start // 8 == (stop - 1) // 8 for start, stop in rows)
    counts = world.scheduler.counts
    assert len(spans) < 12 and counts.accepted == counts.guessed == 40 - len(spans)


@pytest.mark.parametrize("answer", range(1, 24))
def test_an_end_within_what_was_guessed_right_is_the_end(answer: int) -> None:
    """By an end token, and by the number of tokens."""
    for most, reason in ((40, "stop"), (answer, "stop"), (answer - 1, "length")):
        world = speculating(word=lambda position: END if position == 7 + answer else position % 3)
        world.submit("x", [0, 1, 2, 0, 1, 2, 0, END], max(most, 1), answer)
        world.drain()
        assert len(world.text["x", 0]) == min(max(most, 1), answer)
        assert world.ended["x", 0] == reason or answer == 1
        world.scheduler.check()


def test_nothing_is_guessed_while_anybody_waits_or_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = "server.engine.scheduler.WORTH_GUESSING_S"
    for changed, waits in (({"slots": 1}, True), ({"row_s": 100.0}, False), ({"worth": 2.0}, False), ({}, False)):
        monkeypatch.setattr(worth, changed.get("worth", 0.0))
        world = speculating(**{name: value for name, value in changed.items() if name != "worth"})
        world.submit("x", [0, 1, 2, 0, 1, 2, 0, 1], 40)
        for _ in range(40):
            if waits:
                world.submit("another", [1], 1)
            world.step()
            world.scheduler.cancel("another")
        assert (world.scheduler.counts.guessed > 1) == (not changed), changed


def test_one_that_is_ahead_of_its_plan_waits_where_the_room_is_promised() -> None:
    """Five pages. One grows from 1 page to 5; beside it one, which is never guessed, has 2 or 3 for eight steps."""
    world = speculating(pages=5)
    world.submit("fast", [0, 1, 2, 0, 1, 2, 0, 1], 33)
    world.submit("slow", [5] * 16, 9, grammar=Mock())
    for _ in range(8):
        world.step()
        world.scheduler.check()
    fast, slow = world.scheduler.running
    assert fast.computed == 16 and slow.computed == 23 and world.scheduler.counts.held_steps >= 3
    world.step()
    assert ("slow", 0) in world.ended
    world.drain(6)
    assert world.ended["fast", 0] == "length"


def test_one_that_is_ahead_of_its_plan_does_not_wait_for_the_reader_of_another() -> None:
    world = speculating(pages=7)
    world.submit("fast", [0, 1, 2, 0, 1, 2, 0, 1], 33)
    for _ in range(3):
        world.step()
    assert world.scheduler.running[0].computed == 16
    world.submit("held", [5] * 16, 3, grammar=Mock())
    world.step()
    world.scheduler.hold("held", True)
    for _ in range(5):
        world.step()
    assert world.ended["fast", 0] == "length"
    world.scheduler.hold("held", False)
    world.drain()


def repetitive(position: int) -> int:
    """Three words over and over, but for some surprises."""
    return 7 if position % 13 == 9 else position % 3


@pytest.mark.parametrize("slower", [1.0, 1.9])
def test_a_time_that_was_told_holds_where_steps_become_slower(slower: float) -> None:
    world = World(slots=1)
    world.submit("runs", [1], 30)
    for _ in range(12):
        world.step()
    world.submit("waits", [2], 1)
    scheduler, came = world.scheduler, world.now
    latest_s, next_s = scheduler.latest_s(scheduler.waiting[0]), scheduler.next_start_s()
    told = request_state(scheduler, "waits"), request_state(scheduler, "runs")
    assert told[0] and told[1]
    until_s = told[0]["waiting"]["held_by"][0]["until_ms"] / 1000
    assert latest_s == next_s == until_s == told[1]["choices"][0]["latest_end_ms"] / 1000
    while ("waits", 0) not in world.started:
        world.step()
        world.now += slower - 1.0
    assert latest_s and world.now - slower <= came + latest_s
    assert slower > 1.0 or latest_s < 2.5 * (world.now - came)


def test_what_a_pause_of_the_engine_takes_is_no_cost_of_a_step_but_what_comes_between_steps_is() -> None:
    world = World()
    world.submit("x", [1], 9)
    for _ in range(20):  # it ends, and nothing is computed any more
        world.step()
        world.now += 0.5
    assert world.scheduler.cost.predict(1) == pytest.approx(1.5, rel=0.05)
    world.now += 100.0
    world.submit("y", [1], 1)
    world.step()
    assert world.scheduler.cost.predict(1) == pytest.approx(1.5, rel=0.1)


def test_one_that_came_when_its_start_was_too_far_to_tell_is_told_as_soon_as_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVLedger, "HORIZON", 50)
    world = World(slots=1)
    for at in range(8):
        world.submit(str(at), [1], 20)
    scheduler = world.scheduler
    assert [bool(s.plan) for s in scheduler.waiting] == [True] * 3 + [False] * 5
    told: dict[str, float] = {}
    while scheduler.waiting:
        world.step()
        scheduler.check()
        waiting = len(scheduler.waiting)
        assert [bool(s.plan) for s in scheduler.waiting] == [True] * min(waiting, 2) + [False] * (waiting - 2)
        for sequence in scheduler.waiting:
            latest_s = scheduler.latest_s(sequence)
            if latest_s is not None:
                told.setdefault(sequence.request.id, world.now + latest_s)
        for id, _ in world.started:
            assert world.now <= told.pop(id, world.now) + 1.0
    assert not told and scheduler.next_start_s() == 0.0


def test_what_no_horizon_reaches_is_not_told_as_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVLedger, "HORIZON", 10)
    world = World(slots=1)
    world.submit("runs", [1], 40)
    world.step()
    world.submit("waits", [1], 40)
    assert world.scheduler.latest_s(world.scheduler.waiting[0]) is None
    for _ in range(5):
        world.step()
    assert world.scheduler.next_start_s() >= 10.0
    world.drain()


DRAW = st.binary(min_size=9, max_size=9)  # integers would mostly be small ones, and the last choices always the first
PAUSES = (0, 0, 0, 2, 8, 20)  # steps that follow what was done


def digits(draw: bytes, *choices: Seq[Any]) -> list[Any]:
    """One of each of the choices, as a draw says in mixed radix: one cheap draw in place of many."""
    number, chosen = int.from_bytes(draw, "big"), []
    for options in choices:
        number, at = divmod(number, len(options))
        chosen.append(options[at])
    return chosen


class History(RuleBasedStateMachine):
    """Arrivals, steps, ends, failures, cancels, slow readers, deadlines and shared prefixes, in any order."""

    admission = "peak"
    speculates = False

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.told: dict[tuple[str, int], int] = {}  # the first step that was told as the latest
        # a reader was slow: what had been told before no longer holds
        self.excused = self.admission == "learned"

    @initialize(
        windowed=st.sampled_from([False, False, True]),
        slots=st.integers(2, 6),
        pages=st.integers(14, 20),
        chunk=st.integers(1, 8),
        bypass=st.integers(0, 3),
        hold_limit_s=st.sampled_from([3.0, 30.0]),
        faster=st.sampled_from([1, 1, 4]),
    )
    def begin(
        self, windowed: bool, slots: int, pages: int, chunk: int, bypass: int, hold_limit_s: float, faster: int = 1
    ) -> None:
        """faster: times what is planned for may a step take of prompts."""
        fields: dict[str, Any] = {"bypass_limit": bypass, "hold_limit_s": hold_limit_s, "rule": self.admission}
        width = 256
        if self.speculates:
            width, pages = 128, pages // 2  # 8 rows a page
            fields |= {"word": repetitive, "speculate": 2 * chunk, "row_s": (0.0, 0.05, 0.5)[bypass % 3]}
        layout = Windowed(1, 1, width, 56) if windowed else KVLayout(1, 1, width, 56)
        self.world = World(layout, slots, pages, chunk * faster, sure=chunk, **fields)
        for at in range(100):  # a past in which clients used next to nothing: `learned` goes as far as it may
            self.world.ledger.usage.ended(at % 3, by_itself=True)

    @rule(draws=st.lists(DRAW, min_size=1, max_size=3))
    def arrivals(self, draws: list[bytes]) -> None:
        for draw in draws:
            self.submit(draw)

    def submit(self, draw: bytes) -> None:
        id, now = str(len(self.ids)), self.world.now
        self.ids.append(id)
        max_tokens, answer, shared, own, family, n, priority, patience, limit, cache, salt, tail, pause = digits(
            draw,
            (1, 2, 5, 13, 24, 34, 50, 50),
            (2, 5, 13, 100, 100, 100, 100),
            (0, 0, 0, 0, 0, 4, 16, 17, 20, 24),
            range(1, 7),
            (1, 2),
            (1, 1, 1, 1, 1, 2, 6),
            (0, 0, 0, -1, 1),
            (None, None, None, None, 3.0, 40.0),
            (None, None, None, None, 5.0, 60.0),
            (True, True, False),
            ("", "", "other"),
            range(3**6),
            PAUSES,
        )
        prompt = [family] * shared + [1 + tail // 3**at % 3 for at in range(own)]
        self.world.submit(
            id,
            prompt,
            min(max_tokens, 57 - len(prompt)),
            answer,
            n=n,
            priority=priority,
            start_by=None if patience is None else now + patience,
            deadline=None if limit is None else now + limit,
            cache_prefix=cache,
            cache_salt=salt,
        )
        self.steps(pause)

    @rule(draw=DRAW)
    def some_steps(self, draw: bytes) -> None:
        times, bad = digits(draw, (0, 1, 2, 4, 7, 12, 20), (False, False, False, False, True))
        self.world.step(bad)
        self.steps(times)

    def steps(self, times: int) -> None:
        for _ in range(times):
            self.world.step()
            self.sooner_or_later()

    @precondition(lambda self: self.ids)
    @rule(draw=DRAW)
    def cancel(self, draw: bytes) -> None:
        index, id, pause = digits(draw, (None, 0, 1), self.ids[::-1], PAUSES)
        self.world.scheduler.cancel(id, index)
        self.steps(pause)

    @precondition(lambda self: self.ids)
    @rule(draw=DRAW)
    def hold(self, draw: bytes) -> None:
        held, id, pause = digits(draw, (True, True, False), self.ids[::-1], PAUSES)
        self.excused |= held
        self.world.scheduler.hold(id, held)
        self.steps(pause)

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.scheduler.check()
        self.sooner_or_later()

    def sooner_or_later(self) -> None:
        """Nothing is beyond the pool or a plan, nobody passed too often, nobody has to wait longer than told."""
        scheduler = self.world.scheduler
        assert scheduler.ledger.committed_bytes <= scheduler.ledger.budget_bytes
        clock = scheduler.ledger.timetable.now
        for sequence in scheduler.running:
            account = sequence.account
            assert account
            planned = account.plan.take[BYTES, clock - account.plan.begin :]
            assert planned.size or sequence.held, "it outlived its plan"
            assert not planned.size or scheduler.ledger.layout.committed(account.lent) <= planned[0]
        for sequence in scheduler.waiting:
            assert sequence.passed <= scheduler.bypass_limit
            key = (sequence.request.id, sequence.index)
            assert sequence.plan is not None
            told = self.told.setdefault(key, sequence.plan.begin)
            assert self.excused or max(clock, sequence.plan.begin) <= told, "later than told"
        assert self.excused or (not scheduler.counts.postponed and not scheduler.ledger.strained)

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


def test_one_that_may_not_grow_is_planned_anew_while_nothing_is_computed() -> None:
    """Found as a history: a reader is slow, one is ahead of its plan, the banker lets a third wait, and steps pass."""
    history = History()
    history.begin(windowed=False, chunk=1, slots=4, bypass=3, pages=17, hold_limit_s=3.0)
    history.laws()
    history.arrivals(
        draws=[b"\x1c\xe4~\xaf\xa3\xe1\xf5\xd0\x01", b"\x0c\x16\xdd\x1a4\xf46w_", b"9A\x1f\x8cS\xbd\xc9U8"]
    )
    history.laws()
    history.arrivals(
        draws=[b"\xb4\xc1\xaa\x05}\xc1{Ar", b"\x82\xe3\xbe\x03s\x82`\xddp", b"\x03\x03\xfa;\x03?\xe9E\x00"]
    )
    history.laws()
    history.arrivals(draws=[b"\x00\x01\x1e\x00\xc2\x00\x00\x00\x00"])
    history.laws()
    history.arrivals(draws=[b"\x00\x00\x00\x01\x01\x01\x00\x00\x00", b'\x1e"N8\x00\x01\x00\x00\x05'])
    history.laws()
    history.arrivals(draws=[b"\x00\x00\x00\x00\x00\x00\x00\x00\x00", b"\x00\x006\x00\x00\x00\x00\x00\x00"])
    history.laws()
    history.hold(draw=b"\x00\x00\x00\x00\x00\x00\x00\x00\x00")
    history.laws()
    history.arrivals(draws=[b"|\x01\x00qv\x01\t\t\xad"])
    history.laws()
    history.arrivals(
        draws=[
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x00",
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x00",
            b"\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        ]
    )
    history.laws()
    history.hold(draw=b"\x00\x00\x00\x00\x00\x00\x00\x00\x00")
    history.laws()
    history.hold(draw=b"\x00\x00\x00\x00\x00\x00\x00\x00\x00")
    history.laws()
    history.hold(draw=b"\x00\x00\x00\x00\x00\x00\x00\x01\x00")
    history.laws()
    history.arrivals(
        draws=[
            b"O0/\x8a_\x00\x00\xae\xa3",
            b"\x00\x01\x0e\x00\x00\x00\x00\x00\x00",
            b"\x00\x00\x01\x01\x00\x00\x00\x00\x00",
        ]
    )
    history.laws()
    history.teardown()


class ReserveHistory(History):
    admission = "reserve"


class LearnedHistory(History):
    admission = "learned"


class SpeculatingHistory(History):
    speculates = True


class SpeculatingLearnedHistory(LearnedHistory):
    speculates = True


def case(history: type[History], share: float) -> Any:
    """A test of its own for each rule, so that they are spread over the workers."""
    history.TestCase.settings = settings(
        max_examples=int(share * EXAMPLES),
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return history.TestCase


TestPeak = case(History, 0.4)
TestReserve = case(ReserveHistory, 0.1)
TestLearned = case(LearnedHistory, 0.2)
TestSpeculating = case(SpeculatingHistory, 0.2)
TestSpeculatingLearned = case(SpeculatingLearnedHistory, 0.1)
