"""Demand and timeline: what a sequence takes, and how prompts share the rows of a step."""

from __future__ import annotations

import numpy as np
from admitting import FOUR_A_PAGE, LAYOUTS, PAGE, SHAPES, admission_of, lockstep, start
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.demand import BYTES, PROMPT, SLOTS


def test_demand_by_hand() -> None:
    """Two sequences, four rows a page in K and in V: 3 rows growing to 6, and 4 rows growing to 5."""
    admission = admission_of()
    assert (start(admission, 3, 3), start(admission, 4, 1)) == (0, 1)
    # step 0: 3 and 4 rows, a page each; step 1: 4 and 5 rows; then the second has ended: 5 and 6 rows
    assert admission.running_demand().tolist() == [2 * PAGE * pages for pages in (1 + 1, 1 + 2, 2, 2)]
    assert admission.peak_demand_bytes == 6 * PAGE and admission.ledger.allocated_bytes == 4 * PAGE


@given(LAYOUTS, SHAPES)
def test_demand_is_what_is_held_when_all_advance_in_lockstep(layout: KVLayout, shapes: list[tuple[int, int]]) -> None:
    admission = admission_of(layout, len(shapes), 1 << 17)
    ledger, slots = admission.ledger, [start(admission, *shape) for shape in shapes]
    assert None not in slots
    demand = admission.running_demand().tolist()
    assert demand == lockstep(layout, shapes)
    for step, bytes_ in enumerate(demand):
        for slot, (prompt, _) in zip(slots, shapes, strict=True):
            if slot is not None and slot in ledger.allocations:
                ledger.grow(slot, prompt + step)
        assert ledger.allocated_bytes == bytes_ == ledger.committed_bytes
        ledger.check()
        admission.timeline.advance()
        for slot, (_, growth) in zip(slots, shapes, strict=True):
            if step == growth and slot is not None:
                admission.end(slot, keep=False, by_itself=False)
    assert not ledger.allocations and not admission.running_demand().size


def test_a_reservation_is_charged_what_an_immediate_start_would_hold_and_never_less_than_its_own() -> None:
    """A prompt of 4 rows that may grow to 16, reserved 6 steps ahead: 10 rows by then, had it started now."""
    model = admission_of().model
    reserved, due = model.reserved(4, 16, 6), model.running(4, 4, 16, 6)
    assert reserved.amounts[BYTES].tolist() == [FOUR_A_PAGE.committed(min(rows, 16)) for rows in range(10, 23)]
    assert (reserved.amounts >= due.amounts).all() and (reserved.begin, reserved.end) == (due.begin, due.end)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), max_size=8), st.integers(1, 9))
def test_prompts_take_what_earlier_ones_leave_of_each_step(prompts: list[tuple[int, int]], limit: int) -> None:
    admission = admission_of(slots=100, prompt_rows=limit)
    timeline = admission.timeline
    for begin, rows in prompts:
        spread = timeline.spread_prompt(rows, begin)
        assert sum(spread) == rows and spread[-1] > 0
        before = timeline.totals(begin, len(spread))[PROMPT].tolist()
        assert all(part <= max(0, limit - taken) for part, taken in zip(spread, before, strict=True))
        assert all(part == limit - taken for part, taken in zip(spread[:-1], before[:-1], strict=True))
        timeline.add(admission.model.running(rows, rows, rows, begin))
    assert (timeline.totals(0, 200)[PROMPT] <= limit).all()


def test_the_timeline_forgets_the_past_and_grows_into_the_future() -> None:
    admission = admission_of(prompt_rows=1)
    timeline = admission.timeline
    far = admission.model.running(10, 10, 60, 9000)
    timeline.add(far)
    for _ in range(9030):
        timeline.advance()
    assert timeline.totals(timeline.now, 31)[SLOTS].tolist() == [1] * 30 + [0]
    timeline.remove(far)
    assert not timeline.totals(timeline.now, 10_000).any()


def test_amounts_are_integers() -> None:
    """Bytes of a large pool would lose their last bits as floats."""
    admission = admission_of(pages=2**44)
    assert admission.timeline.limits.dtype == admission.model.running(4, 4, 9, 0).amounts.dtype == np.int64
    assert admission.timeline.limits[0, 0] == 2**44 * 2 * PAGE and FOUR_A_PAGE.committed(4) == 2 * PAGE
