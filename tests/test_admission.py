"""Admission: who starts now and who is reserved a start, under each rule; each against a slow and plain computation."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from admitting import FOUR_A_PAGE, LAYOUTS, PAGE, SHAPES, admission_of, end, lockstep, start
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.admission import Admission, Rule
from tokenteller.server.engine.demand import BYTES
from tokenteller.server.engine.output_lengths import ENOUGH


@given(LAYOUTS, SHAPES, st.integers(1, 60))
def test_peak_admits_exactly_what_the_formula_covers(
    layout: KVLayout, shapes: list[tuple[int, int]], pages: int
) -> None:
    """It is enough to look at the steps s = r_i at which a sequence ends: D only falls there."""
    admission = admission_of(layout, len(shapes), pages)
    admitted: list[tuple[int, int]] = []
    for shape in shapes:
        together = [*admitted, shape]
        demand = lockstep(layout, together)
        assert max(demand) == max(demand[growth] for _, growth in together)
        slot = start(admission, *shape)
        assert (slot is not None) == (max(demand) <= admission.ledger.budget_bytes)
        if slot is not None:
            admitted.append(shape)
        admission.ledger.check()
        assert admission.banker.safe()


@given(LAYOUTS, SHAPES, st.integers(1, 60))
def test_reserve_admits_exactly_the_sum_of_all_maxima(
    layout: KVLayout, shapes: list[tuple[int, int]], pages: int
) -> None:
    admission = admission_of(layout, len(shapes), pages, "reserve")
    total = 0
    for prompt, growth in shapes:
        most = layout.committed(prompt + growth)
        admitted = start(admission, prompt, growth) is not None
        assert admitted == (total + most <= admission.ledger.budget_bytes)
        total += most if admitted else 0


# Reservations


def test_a_reserved_start_leaves_room_for_every_earlier_one() -> None:
    """A sequence may start at any step between its reservation and now, and no other reservation has to move."""
    admission = admission_of(slots=8, pages=8)
    running = start(admission, 8, 16)
    first = admission.reserve(8, 20, 0)
    second = admission.reserve(4, 20, first.begin if first else 0)
    assert running == 0 and first and second and 0 < first.begin <= second.begin
    end(admission, 0)
    early = admission.start(8, 20, first)
    assert early is not None and early.begin == 0
    admission.ledger.allocate("first", 8, 20, early)
    assert (admission.timeline.totals(0, 60)[BYTES] <= admission.ledger.budget_bytes).all()
    for _ in range(second.begin):
        admission.timeline.advance()
    assert admission.start(4, 20, second) is not None


@pytest.mark.parametrize("rule", ["peak", "reserve"])
def test_the_cheap_look_rules_out_only_starts_that_do_not_fit(rule: Rule) -> None:
    rng, ruled_out = random.Random(1), 0
    for _ in range(1000):
        admission = admission_of(
            slots=rng.randint(2, 6), pages=rng.randint(13, 26), rule=rule, prompt_rows=rng.randint(1, 20)
        )
        timeline, slots = admission.timeline, []
        while (slot := start(admission, rng.randint(1, 20), rng.randint(0, 30))) is not None:
            slots.append(slot)
        prompt, rows_max = rng.randint(1, 20), rng.randint(20, 50)
        reservation = admission.reserve(prompt, rows_max, 0)
        while reservation and reservation.begin > timeline.now:
            cannot_fit = admission._cannot_fit(prompt, rows_max, reservation)
            timeline.remove(reservation)
            conflict = timeline.last_conflict(admission.model.running(prompt, prompt, rows_max, timeline.now))
            timeline.add(reservation)
            assert conflict is not None or not cannot_fit
            reservation.conflict, ruled_out = conflict or -1, ruled_out + cannot_fit
            if slots and rng.random() < 0.5:
                end(admission, slots.pop(rng.randrange(len(slots))))
            timeline.advance()
    assert ruled_out > 1000


def test_the_step_that_ruled_out_a_start_is_remembered() -> None:
    """As long as that one step is too full, no demand is computed."""
    admission = admission_of(pages=6)
    assert (start(admission, 4, 16), start(admission, 4, 8)) == (0, 1)
    reservation = admission.reserve(4, 20, 0)
    assert reservation and admission.start(4, 20, reservation) is None and reservation.conflict > 0
    assert not admission.timeline.is_full(0, 2 * PAGE, reservation) and admission._cannot_fit(4, 20, reservation)
    end(admission, 0)
    assert not admission._cannot_fit(4, 20, reservation) and admission.start(4, 20, reservation) is not None


# The banker's algorithm


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 40))
def test_safe_means_that_some_order_lets_all_finish(shapes: list[tuple[int, int]], pages: int) -> None:
    admission = admission_of(slots=len(shapes), pages=1 << 17)
    for shape in shapes:
        start(admission, *shape)
    admission.ledger.budget_bytes = pages * 2 * PAGE
    bytes_ = FOUR_A_PAGE.committed

    def works(order: tuple[tuple[int, int], ...]) -> bool:
        free = admission.ledger.budget_bytes - sum(bytes_(prompt) for prompt, _ in order)
        for prompt, growth in order:
            if free < 0 or bytes_(prompt + growth) - bytes_(prompt) > free:
                return False
            free += bytes_(prompt)
        return True

    assert admission.banker.safe() == any(map(works, permutations(shapes)))


def test_of_two_whose_growth_leaves_no_safe_order_the_younger_stalls() -> None:
    """Two of 4 rows that may grow to 8, in a pool of 3 pages a lane: one of them may grow, the older."""
    admission = admission_of(slots=2)
    assert [start(admission, 4, 4), start(admission, 4, 4)] == [0, 1]
    for slot in (0, 1):
        admission.ledger.grow(slot, 4)
    admission.ledger.budget_bytes, admission._oversubscribed_until = 3 * 2 * PAGE, 10**6
    assert admission.stalled([0, 1]) == {1}
    assert admission.stalled([1]) == set()


# `learned`


def learning(pages: int, used: int) -> Admission:
    """The rule `learned`, with a past in which all clients ended by themselves after `used` rows."""
    admission = admission_of(slots=20, pages=pages, rule="learned")
    for _ in range(ENOUGH):
        admission.output_lengths.ended(used, by_itself=True)
    return admission


def test_learned_admits_beyond_the_peak_what_is_not_used_but_keeps_a_safe_order() -> None:
    counts = {}
    for used in (2, 60):
        admission = learning(30, used)
        while start(admission, 8, 40) is not None:
            admission.ledger.check()
        counts[used] = len(admission.ledger.allocations)
        assert admission.banker.safe()
    # 30 pages hold two of 12 pages; if each ends within its third page, there is room until no order would be safe
    assert counts == {2: 10, 60: 2}
    fresh = admission_of(slots=20, pages=30, rule="learned")
    while start(fresh, 8, 40) is not None:
        pass
    assert len(fresh.ledger.allocations) == 2, "without a past it admits as `peak` does"


def test_learned_falls_back_to_the_peak_while_many_stall() -> None:
    admission = learning(30, 2)
    for slot in range(10):
        assert start(admission, 8, 40) == slot
        admission.ledger.grow(slot, 8)
    stalled = admission.stalled(list(range(10)))
    assert stalled and 0 not in stalled and len(stalled) < 10
    for slot in range(9, 5, -1):
        end(admission, slot)
    assert start(admission, 8, 40) is None
    for _ in range(int(len(stalled) / admission.STALLED)):
        admission.stalled([])
    assert start(admission, 8, 40) is not None
