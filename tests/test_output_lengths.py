"""Output lengths: the survival function, and the demand expected from it, each against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.output_lengths import ExpectedDemand, survival

FOUR_A_PAGE = KVLayout(1, 1, 256, 64)  # K and V lane: a row is 1 KiB in each


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40))
def test_survival_is_the_product_of_the_chances_to_continue(seen: list[tuple[int, bool]]) -> None:
    used, by_itself = np.array([rows for rows, _ in seen]), np.array([ended for _, ended in seen])
    plain, chance = [], 1.0
    for length in range(13):
        at_risk = sum(rows >= length for rows, _ in seen)
        ended = sum(rows == length and itself for rows, itself in seen)
        chance *= 1 - ended / at_risk if at_risk else 1.0
        plain.append(chance)
    assert survival(used, by_itself, 12) == pytest.approx(plain)


def test_outputs_cut_off_or_still_running_do_not_look_short() -> None:
    """Half ended by themselves at 100; the others were cut off at 10, or have just begun."""
    used = np.array([100] * 50 + [10] * 25 + [3] * 25)
    by_itself = used == 100
    chance = survival(used, by_itself, 200)
    assert chance[99] == 1.0 and chance[100] == 0.0


CLAIMS = st.lists(  # rows held, of them generated, still to come, steps until the next
    st.tuples(st.integers(10, 20), st.integers(0, 10), st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=5
)


@given(CLAIMS, st.lists(st.floats(0, 1), min_size=64, max_size=64))
def test_expected_demand_is_never_below_the_plain_sum(
    claims: list[tuple[int, int, int, int]], hazard: list[float]
) -> None:
    chance = np.cumprod(1 - np.array(hazard) / 8)
    curve = np.array([FOUR_A_PAGE.committed(rows) for rows in range(65)])
    chance = np.append(chance, chance[-1])
    empty = ExpectedDemand(chance, curve)
    together = empty.add(np.array(claims))
    one_by_one = empty
    for claim in claims:
        one_by_one = one_by_one.add(np.array([claim]))
    assert one_by_one.mean == pytest.approx(together.mean) and one_by_one.peak(2) == pytest.approx(together.peak(2))
    for at in range(0, 128, ExpectedDemand.GRID):
        mean = 0.0
        for rows, generated, left, delay in claims:
            steps = max(0, at - delay)
            if steps <= left:
                mean += chance[generated + steps] / chance[generated] * curve[rows + steps]
        assert together.mean[at // ExpectedDemand.GRID] >= mean * 0.999999
    assert together.peak(3) >= together.peak(0)
