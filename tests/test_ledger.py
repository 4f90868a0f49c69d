"""The ledger: slots, allocations and cached rows."""

from __future__ import annotations

import pytest
from admitting import PAGE, admission_of, start

from tokenteller.server.engine.ledger import KVLedger


def cached(slots: int, pages: int) -> KVLedger:
    """All slots cached with 8 rows, two pages a lane."""
    admission = admission_of(slots=slots, pages=pages)
    for slot in range(slots):
        assert start(admission, 8, 0) == slot
        admission.ledger.grow(slot, 8)
        admission.end(slot, keep=True, by_itself=False)
    return admission.ledger


def allocate(ledger: KVLedger, rows: int, slot: int | None = None) -> tuple[int, list[int]]:
    demand = admission_of().model.running(rows, rows, rows, 0)
    return ledger.allocate("x", rows, rows, demand, slot)


def test_cached_slots_are_evicted_least_recently_used_first_and_only_when_wanted() -> None:
    ledger = cached(3, pages=6)
    assert ledger.free_slots == 3 and ledger.committed_bytes == 6 * 2 * PAGE and not ledger.allocated_bytes
    ledger.touch(0)
    assert allocate(ledger, 8) == (1, [1]) and list(ledger.cached) == [2, 0]
    ledger.check()
    assert allocate(ledger, 12, slot=0) == (0, [2])
    ledger.check()


def test_a_cached_slot_can_stay_beside_a_new_prompt_while_slots_and_bytes_last() -> None:
    assert cached(2, pages=4).can_keep(0, prompt=8)
    assert not cached(2, pages=4).can_keep(0, prompt=9), "no bytes"
    assert not cached(1, pages=4).can_keep(0, prompt=8), "no slot"


def test_rows_up_to_the_end_of_a_page_cost_nothing() -> None:
    admission = admission_of()
    assert start(admission, 3, 6) == 0
    ledger = admission.ledger
    ledger.grow(0, 3)
    assert (ledger.next_row_bytes(0), ledger.rows_after_next(0)) == (0, 0)
    ledger.grow(0, 4)
    assert (ledger.next_row_bytes(0), ledger.rows_after_next(0)) == (2 * PAGE, 3)
    ledger.grow(0, 8)
    assert (ledger.next_row_bytes(0), ledger.rows_after_next(0)) == (2 * PAGE, 0), "9 rows are the most it may have"
    with pytest.raises(AssertionError):
        ledger.grow(0, 10)


def test_a_prompt_is_charged_in_full_before_it_is_computed() -> None:
    admission = admission_of()
    start(admission, 12, 4)
    ledger = admission.ledger
    ledger.grow(0, 4)
    assert (ledger.committed_bytes, ledger.allocated_bytes) == (2 * PAGE, 6 * PAGE)
    ledger.grow(0, 13)
    assert ledger.committed_bytes == ledger.allocated_bytes == 8 * PAGE
