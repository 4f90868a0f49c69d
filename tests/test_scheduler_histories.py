"""Random histories of the scheduler: all that is admitted ends, nobody waits longer than reported, no row is wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import Windowed, World

from tokenteller.model.kv_memory import KVLayout

EXAMPLES = int(os.environ.get("TOKENTELLER_EXAMPLES", "2000"))


def repetitive(position: int) -> int:
    """Three words over and over, with a surprise now and then."""
    return 7 if position % 13 == 9 else position % 3


DRAW = st.binary(
    min_size=9, max_size=9
)  # drawn integers would be small, so that the last choices were always the first
PAUSES = (0, 0, 0, 2, 8, 20)  # steps after each action


def digits(draw: bytes, *choices: Seq[Any]) -> list[Any]:
    """One of each of the choices, by the digits of the draw in mixed radix: one cheap draw in place of many."""
    number, chosen = int.from_bytes(draw, "big"), []
    for options in choices:
        number, at = divmod(number, len(options))
        chosen.append(options[at])
    return chosen


class History(RuleBasedStateMachine):
    """Arrivals, steps, ends, failures, cancels, slow readers, deadlines and shared prefixes, in any order."""

    admission = "peak"
    drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.reported: dict[tuple[str, int], int] = {}  # the latest start first reported, as a step
        # a slow reader voids what was reported before
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
        """faster: how many times the prompt rows that the timeline counts on fit in a step."""
        fields: dict[str, Any] = {"bypass_limit": bypass, "hold_limit_s": hold_limit_s, "rule": self.admission}
        width = 256
        if self.drafts:
            width, pages = 128, pages // 2  # 8 rows a page
            fields |= {"word": repetitive, "draft_tokens": 2 * chunk, "row_s": (0.0, 0.05, 0.5)[bypass % 3]}
        layout = Windowed(1, 1, width, 56) if windowed else KVLayout(1, 1, width, 56)
        self.world = World(layout, slots, pages, chunk * faster, sure=chunk, **fields)
        for at in range(100):  # a past of very short outputs, so that `learned` goes as far as it may
            self.world.scheduler.admission.output_lengths.ended(at % 3, by_itself=True)

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
            self.in_time()

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
        self.in_time()

    def in_time(self) -> None:
        """Nothing exceeds the pool or its demand, nobody is bypassed too often or waits longer than reported."""
        scheduler, now = self.world.scheduler, self.world.scheduler.timeline.now
        assert scheduler.ledger.committed_bytes <= scheduler.ledger.budget_bytes
        for sequence in scheduler.running:
            assert sequence.allocation
            demand, charged = sequence.allocation.demand, sequence.allocation.charged_rows
            assert demand.end >= now or sequence.held, "it has outlived its demand"
            assert demand.end < now or scheduler.ledger.layout.committed(charged) <= demand.bytes_at(now)
        for sequence in scheduler.waiting:
            assert sequence.bypassed <= scheduler.queue.bypass_limit
            key = (sequence.request.id, sequence.index)
            assert sequence.reservation is not None
            reported = self.reported.setdefault(key, sequence.reservation.begin)
            assert self.excused or max(now, sequence.reservation.begin) <= reported, "later than reported"
        assert self.excused or (not scheduler.counts.postponed and not scheduler.admission.oversubscribed)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for id in self.ids:
            self.world.scheduler.hold(id, False)
        self.world.drain()
        self.laws()
        scheduler = self.world.scheduler
        assert not scheduler._live
        assert not scheduler.ledger.allocated_bytes and scheduler.ledger.free_slots == scheduler.ledger.slots


def test_a_stalled_sequence_is_replanned_while_nothing_is_computed() -> None:
    """Found by a history: a slow reader, a sequence ahead of its demand, a third stalled by the banker; steps pass."""
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


class DraftingHistory(History):
    drafts = True


class DraftingLearnedHistory(LearnedHistory):
    drafts = True


def case(history: type[History], share: float) -> Any:
    """One test per rule, so that they spread over the workers."""
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
TestDrafting = case(DraftingHistory, 0.2)
TestDraftingLearned = case(DraftingLearnedHistory, 0.1)
