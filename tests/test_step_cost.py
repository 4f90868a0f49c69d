"""StepCost: base and slope of a step, from the steps so far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.server.engine.step_cost import StepCost


def test_base_and_slope_are_learned() -> None:
    cost = StepCost()
    for step in range(200):
        rows = 1 + step % 37
        cost.observe(rows, 0.02 + 0.001 * rows)
    assert cost.base == pytest.approx(0.02, rel=1e-3) and cost.slope == pytest.approx(0.001, rel=1e-3)
    assert cost.rows_within(0.05, 1000) in (29, 30) and cost.rows_within(0.01, 1000) == 0
    assert cost.rows_within(9.0, 64) == 64
    cost.observe(10, 100.0)  # the machine slept
    assert cost.predict(10) < 0.06


def test_equal_steps_say_nothing_of_the_slope() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(8, 0.04)
    assert cost.predict(8) == pytest.approx(0.04)
    assert cost.rows_within(1.0, 64) == 0  # what one more row would cost is unknown


def test_the_slope_is_not_forgotten_while_all_steps_are_equal() -> None:
    cost = StepCost()
    for rows in [8, 40] * 50:
        cost.observe(rows, 0.004 + 0.0005 * rows)
    for _ in range(2_000):
        cost.observe(8, 0.006)  # slower than before
    assert cost.slope == pytest.approx(0.0005, rel=0.2) and cost.predict(8) == pytest.approx(0.006, rel=1e-3)


def test_rows_are_never_taken_to_be_free() -> None:
    cost = StepCost()
    for rows in [8, 40] * 50:
        cost.observe(rows, 0.004 + 0.0005 * rows)
    for rows in [40, 30, 20, 10, 5, 2] * 4:  # many clients leave: fewer rows, yet slower
        cost.observe(rows, 0.03 - 0.0002 * rows)
    assert cost.slope > 0.0 and cost.predict(20) == pytest.approx(0.026, rel=0.3)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 0.5)), min_size=1, max_size=80))
def test_no_cost_is_ever_negative(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
        assert cost.base >= 0.0 <= cost.slope
    mean = cost._y / cost._n
    assert cost.predict(cost._x / cost._n) == pytest.approx(mean), "the fit goes through the mean"
