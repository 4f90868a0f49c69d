"""What is reported to those that wait: latest starts in seconds, from reservations and the cost of steps."""

from __future__ import annotations

import pytest
from world import World

from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.waiting import latest_start_s, next_start_s, request_state


@pytest.mark.parametrize("slower", [1.0, 1.9])
def test_a_reported_latest_start_holds_when_steps_become_slower(slower: float) -> None:
    world = World(slots=1)
    world.submit("runs", [1], 30)
    for _ in range(12):
        world.step()
    world.submit("waits", [2], 1)
    scheduler, came = world.scheduler, world.now
    latest_s, next_s = latest_start_s(scheduler, scheduler.waiting[0]), next_start_s(scheduler)
    waits, runs = request_state(scheduler, "waits"), request_state(scheduler, "runs")
    assert waits and runs
    until_s = waits["waiting"]["held_by"][0]["until_ms"] / 1000
    assert latest_s == next_s == until_s == runs["choices"][0]["latest_end_ms"] / 1000
    while ("waits", 0) not in world.started:
        world.step()
        world.now += slower - 1.0
    assert latest_s and world.now - slower <= came + latest_s
    assert slower > 1.0 or latest_s < 2.5 * (world.now - came)


def test_idle_time_is_no_cost_of_a_step_but_time_between_steps_is() -> None:
    world = World()
    world.submit("x", [1], 9)
    for _ in range(20):  # it ends on the way, and the rest is idle
        world.step()
        world.now += 0.5
    assert world.scheduler.cost.predict(1) == pytest.approx(1.5, rel=0.05)
    world.now += 100.0
    world.submit("y", [1], 1)
    world.step()
    assert world.scheduler.cost.predict(1) == pytest.approx(1.5, rel=0.1)


def test_a_start_beyond_the_horizon_is_reserved_as_soon_as_it_is_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Admission, "HORIZON", 50)
    world = World(slots=1)
    for at in range(8):
        world.submit(str(at), [1], 20)
    scheduler = world.scheduler
    assert [bool(s.reservation) for s in scheduler.waiting] == [True] * 3 + [False] * 5
    reported: dict[str, float] = {}
    while scheduler.waiting:
        world.step()
        scheduler.check()
        waiting = len(scheduler.waiting)
        assert [bool(s.reservation) for s in scheduler.waiting] == [True] * min(waiting, 2) + [False] * (waiting - 2)
        for sequence in scheduler.waiting:
            latest_s = latest_start_s(scheduler, sequence)
            if latest_s is not None:
                reported.setdefault(sequence.request.id, world.now + latest_s)
        for id, _ in world.started:
            assert world.now <= reported.pop(id, world.now) + 1.0
    assert not reported and next_start_s(scheduler) == 0.0


def test_a_start_beyond_the_horizon_is_never_reported_as_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "HORIZON", 10)
    world = World(slots=1)
    world.submit("runs", [1], 40)
    world.step()
    world.submit("waits", [1], 40)
    assert latest_start_s(world.scheduler, world.scheduler.waiting[0]) is None
    for _ in range(5):
        world.step()
    assert next_start_s(world.scheduler) >= 10.0
    world.drain()
