"""The scheduler, case by case: copies, stalls, deadlines, and rows for prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import World

from tokenteller.server.engine.prefix_cache import common_prefix
from tokenteller.server.engine.sequence import Copy, Release


def test_rows_are_copied_before_their_slot_goes_to_another() -> None:
    """The source ends with the step that computes the shared rows, and a third sequence wants its slot."""
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


def test_a_sequence_waiting_for_a_copy_still_computes_its_planned_rows() -> None:
    """The source is planned to finish the shared rows in the very step that is planned as the follower's last."""
    world, shared = World(slots=3, chunk=6), list(range(21))
    world.submit("gives up", [77] * 24, 1)
    world.submit("source", shared, 1)
    world.step()
    world.scheduler.cancel("gives up")
    world.submit("follower", shared, 1)
    world.step()
    source, follower = (world.scheduler.sequences(id)[0] for id in ("source", "follower"))
    assert follower.source is source and follower.allocation and source.allocation
    assert follower.allocation.demand.ready == source.allocation.demand.end == 7
    for _ in range(6):
        world.scheduler.check()
        world.step()
    assert set(world.ended) == {("source", 0), ("follower", 0)}


def test_growth_stalls_while_a_slow_reader_may_need_the_last_page() -> None:
    """Ten pages. One has four and may need five; the other was to grow from four to nine after the first ended.

    Under `peak` only slow readers oversubscribe the pool.
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
    assert (slow.computed, grows.computed) == (16, 20) and world.scheduler.counts.stalled_steps
    world.scheduler.hold("slow", False)
    world.drain()
    assert world.ended == {("slow", 0): "length", ("grows", 0): "length"}


def test_a_sequence_stalled_in_an_empty_step_can_be_cancelled() -> None:
    world = World()
    world.submit("slow", [1] * 4, 8)
    world.submit("stalls", [2] * 4, 8)
    world.step()
    world.step()
    world.scheduler.hold("slow", True)
    stalled = world.scheduler.admission.stalled
    world.scheduler.admission.stalled = set  # type: ignore[method-assign, assignment]  # stalls all that grow
    steps = [world.step() for _ in range(5)]  # until it needs its next page
    assert not steps[-1].spans and world.scheduler.counts.stalled_steps
    world.scheduler.admission.stalled = stalled  # type: ignore[method-assign]
    world.scheduler.cancel("stalls")
    world.submit("next", [3] * 4, 2)
    world.step()
    world.scheduler.hold("slow", False)
    world.drain()
    world.scheduler.check()


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    world = World(slots=1)
    world.submit("long", [1], 50, deadline=1e6)
    for at in range(500):
        world.submit(str(at), [2], 5, deadline=float(at + 1), start_by=0.5)
        world.scheduler.cancel(str(at))
    assert world.scheduler.next_expiry() == 1e6 and not world.step().events[1:]
    world.drain()
    assert world.scheduler.next_expiry() is None and world.ended == {("long", 0): "length"}


def test_start_by_is_met_once_one_choice_has_a_slot_and_a_deadline_ends_them_all() -> None:
    world = World(slots=1)
    world.submit("patient", [1], 4, n=3, start_by=6.0, deadline=9.5)
    world.submit("late", [2], 4, start_by=6.0)
    world.drain()
    assert world.ended == {
        ("patient", 0): "length",
        ("patient", 1): "length",
        ("patient", 2): "deadline",
        ("late", 0): "deadline",
    }
    assert len(world.text["patient", 2]) == 2 and ("late", 0) not in world.started


@pytest.mark.parametrize(("gap", "rows"), [(None, 9), (0.05, 32), (0.001, 4), (10.0, 64)])
def test_prompts_get_the_rows_that_leave_decoding_its_pace(gap: float | None, rows: int) -> None:
    """A step costs 10 ms and 1 ms a row; 8 decode: 18 ms, half more is 27. 4 rows are sure, 64 are the most."""
    world = World(chunk=64, sure=4, token_gap_s=gap)
    budget = world.scheduler.batcher.prefill_budget
    assert budget(8, 1) == 4  # nothing is known yet
    for computed in [8, 40] * 50:
        world.scheduler.cost.observe(computed, 0.01 + 0.001 * computed)
    assert budget(8, 1) in (rows, rows - 1) and budget(0, 1) == 64
    if gap is None:  # 18 ms and half as much for each of three prompts
        assert budget(8, 3) in (26, 27) and budget(8, 99) == 64


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 70))
def test_common_prefix_is_the_longest(one: list[int], other: list[int], limit: int) -> None:
    plain = 0
    while plain < min(len(one), len(other), limit) and one[plain] == other[plain]:
        plain += 1
    assert common_prefix(one, other, limit) == plain
    assert common_prefix([7] * 30 + one, [7] * 30 + other, 30 + limit) == 30 + plain
