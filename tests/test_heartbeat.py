"""How long a step may take before the engine counts as stuck."""

from __future__ import annotations

import pytest

from tokenteller.server.engine.heartbeat import StepDeadline


def test_the_deadline_of_a_step_follows_its_size_and_what_such_steps_took() -> None:
    deadline = StepDeadline(one_row_s=0.4)  # a big model: one row takes 0.4 s
    assert deadline.of(1) == pytest.approx(4.0)
    assert deadline.of(40) == pytest.approx(4.0 * 2**5)  # a size not seen: as much per row as the next smaller one
    deadline.learn(40, 3.0)
    assert deadline.of(40) == pytest.approx(30.0)
    assert deadline.of(100) == pytest.approx(60.0)
    for _ in range(100):
        deadline.learn(1, 0.4)
    assert deadline.of(40) == pytest.approx(30.0)  # many small steps make no large one suspect
    assert StepDeadline(one_row_s=0.001).of(64) == StepDeadline.FLOOR_S
