"""Draft tokens in the scheduler: when they are made, what they may take, and what becomes of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from world import END, World

from tokenteller.model.kv_memory import KVLayout

EIGHT_A_PAGE = KVLayout(1, 1, 128, 56)


def drafting(pages: int = 100, **settings: Any) -> World:
    return World(
        EIGHT_A_PAGE,
        pages=pages,
        chunk=24,
        draft_tokens=8,
        **{"word": lambda position: position % 3, "row_s": 0.01} | settings,
    )


def test_right_draft_tokens_come_early_and_stay_in_the_page_of_the_row_before() -> None:
    world = drafting()
    world.submit("x", [0, 1, 2, 0, 1, 2, 0, 1], 40)
    spans = [span for _ in range(40) for span in world.step().spans]
    assert world.text["x", 0] == [position % 3 for position in range(8, 48)] and world.ended["x", 0] == "length"
    rows = [(span.start, span.stop) for span in spans]
    assert rows[0] == (0, 8) and rows[-1][1] == 47, "the last token is not fed back"
    assert all(start // 8 == (stop - 1) // 8 for start, stop in rows)
    counts = world.scheduler.counts
    assert len(spans) < 12 and counts.accepted == counts.drafted == 40 - len(spans)


@pytest.mark.parametrize("answer", range(1, 24))
def test_an_end_among_right_draft_tokens_ends_the_text(answer: int) -> None:
    """By an end token, and by the number of tokens."""
    for most, reason in ((40, "stop"), (answer, "stop"), (answer - 1, "length")):
        world = drafting(word=lambda position: END if position == 7 + answer else position % 3)
        world.submit("x", [0, 1, 2, 0, 1, 2, 0, END], max(most, 1), answer)
        world.drain()
        assert len(world.text["x", 0]) == min(max(most, 1), answer)
        assert world.ended["x", 0] == reason or answer == 1
        world.scheduler.check()


def test_nothing_is_drafted_while_any_request_waits_or_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = "tokenteller.server.engine.drafting.MIN_STEP_S"
    for changed, waits in (({"slots": 1}, True), ({"row_s": 100.0}, False), ({"worth": 2.0}, False), ({}, False)):
        monkeypatch.setattr(worth, changed.get("worth", 0.0))
        world = drafting(**{name: value for name, value in changed.items() if name != "worth"})
        world.submit("x", [0, 1, 2, 0, 1, 2, 0, 1], 40)
        for _ in range(40):
            if waits:
                world.submit("another", [1], 1)
            world.step()
            world.scheduler.cancel("another")
        assert (world.scheduler.counts.drafted > 1) == (not changed), changed


def test_a_sequence_ahead_of_its_demand_stalls_where_its_next_page_is_reserved() -> None:
    """Five pages. One grows from 1 page to 5; the other, which never drafts, has 2 or 3 for eight steps."""
    world = drafting(pages=5)
    world.submit("fast", [0, 1, 2, 0, 1, 2, 0, 1], 33)
    world.submit("slow", [5] * 16, 9, grammar=Mock())
    for _ in range(8):
        world.step()
        world.scheduler.check()
    fast, slow = world.scheduler.running
    assert fast.computed == 16 and slow.computed == 23 and world.scheduler.counts.stalled_steps >= 3
    world.step()
    assert ("slow", 0) in world.ended
    world.drain(6)
    assert world.ended["fast", 0] == "length"


def test_a_sequence_ahead_of_its_demand_does_not_wait_for_another_s_reader() -> None:
    world = drafting(pages=7)
    world.submit("fast", [0, 1, 2, 0, 1, 2, 0, 1], 33)
    for _ in range(3):
        world.step()
    assert world.scheduler.running[0].computed == 16
    world.submit("held", [5] * 16, 3, grammar=Mock())
    world.step()
    world.scheduler.hold("held", True)
    for _ in range(5):
        world.step()
    assert world.ended["fast", 0] == "length"
    world.scheduler.hold("held", False)
    world.drain()


def repetitive(position: int) -> int:
    """Three words over and over, but for some surprises."""
    return 7 if position % 13 == 9 else position % 3
