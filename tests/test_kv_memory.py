"""The KV memory formula against numbers worked out by hand, and the plan that follows from it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.kv_memory import PAGE_BYTES, KVLayout, kv_bytes_per_token, plan, rows_max

KIB, GIB = 2**10, 2**30
# 40 layers, 32 heads of 128, fp16: the textbook's 13B model
TEXTBOOK = KVLayout(num_layers=40, num_kv_heads=32, head_dim=128, max_context=4096, bytes_per_element=2)


def test_the_textbook_model_takes_640_kib_per_token() -> None:
    assert kv_bytes_per_token(1, 32, 128, 2) == 16_384
    assert TEXTBOOK.bytes_per_token == 655_360 == 640 * KIB
    assert TEXTBOOK.kv_bytes(2048) == 1.25 * GIB
    assert TEXTBOOK.kv_bytes(4096) == 2.5 * GIB


def test_fewer_kv_heads_take_their_share() -> None:
    assert replace(TEXTBOOK, num_kv_heads=8).bytes_per_token * 4 == TEXTBOOK.bytes_per_token
    assert replace(TEXTBOOK, num_kv_heads=1).bytes_per_token * 32 == TEXTBOOK.bytes_per_token


def test_two_gib_do_not_hold_one_full_sequence_and_the_plan_says_what_would_fit() -> None:
    fit = plan(TEXTBOOK, slots=16, pool_bytes=2 * GIB, weight_bytes=8 * GIB)
    assert not fit.fits
    advice = " ".join(fit.advice)
    assert "2.5 GiB" in advice and "2 GiB" in advice
    # 2 GiB / 640 KiB = 3,276.8 rows; a lane has whole pages of 16 rows, so 204 pages or 3,264 rows
    assert "--max-context 3264" in advice
    assert "25 kv heads" in advice  # 32 * 2 / 2.5 = 25.6
    assert plan(replace(TEXTBOOK, max_context=3264), slots=16, pool_bytes=2 * GIB, weight_bytes=0).fits
    assert plan(replace(TEXTBOOK, num_kv_heads=25), slots=16, pool_bytes=2 * GIB, weight_bytes=0).fits


def test_the_plan_counts_how_many_fit_by_bytes_and_by_slots() -> None:
    fit = plan(TEXTBOOK, slots=3, pool_bytes=10 * GIB, weight_bytes=0)
    last = fit.table[-1]
    assert (last.tokens, last.fit_in_bytes, last.fit) == (4096, 4, 3)
    assert fit.fits and fit.advice == ()


def test_the_last_sampled_token_needs_no_row() -> None:
    assert rows_max(1, 1) == 1
    assert rows_max(100, 28) == 127


layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([16, 32, 64, 80, 128]),
    max_context=st.integers(1, 3000),
    bytes_per_element=st.sampled_from([2, 4]),
)


@given(layouts, st.integers(0, 3000))
def test_committed_is_the_formula_rounded_up_to_pages_per_lane(layout: KVLayout, rows: int) -> None:
    rows = min(rows, layout.max_context)
    committed = layout.committed(rows)
    assert committed % PAGE_BYTES == 0
    assert layout.kv_bytes(rows) <= committed < layout.kv_bytes(rows) + layout.lanes * PAGE_BYTES
    assert committed <= layout.slot_bytes


@given(layouts, st.integers(0, 2**30))
def test_rows_that_fit_fit_and_one_more_does_not(layout: KVLayout, pool_bytes: int) -> None:
    rows = layout.rows_that_fit(pool_bytes)
    assert layout.committed(rows) <= pool_bytes
    assert rows == layout.max_context or layout.committed(rows + 1) > pool_bytes
