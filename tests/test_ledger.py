"""The ledger: the formula, what a plan takes, when a state is safe; each against a slow and plain way to tell."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.cost import StepCost
from tokenteller.server.engine.ledger import BYTES, PROMPT, SEATS, KVLedger, Rule, Timetable
from tokenteller.server.engine.scheduler import Scheduler, common_prefix
from tokenteller.server.engine.usage import KNOWN, Expected, survival

PAGE = 4096
FOUR_A_PAGE = KVLayout(1, 1, 256, 64)  # K and V lane: a row is 1 KiB in each
WINDOWED = KVLayout(2, 1, 256, 64, windows=(8, None), chunk=4)

LAYOUTS = st.sampled_from([FOUR_A_PAGE, WINDOWED, KVLayout(1, 1, 256, 64, paged=False)])
SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=6)  # prompt, rows to come


def lend(ledger: KVLedger, prompt: int, growth: int) -> int | None:
    """A slot for a sequence whose prompt is computed at once, if the rule admits it."""
    plan = ledger.start(prompt, prompt + growth, None)
    if plan is None:
        return None
    slot, _ = ledger.open("x", prompt, prompt + growth, plan)
    return slot


def lockstep(layout: KVLayout, shapes: list[tuple[int, int]]) -> list[int]:
    """D(s): committed bytes at each step when all grow a row a step and leave when they have all they asked for."""
    last = max(growth for _, growth in shapes)
    return [
        sum(layout.committed(prompt + step) for prompt, growth in shapes if step <= growth) for step in range(last + 1)
    ]


def test_demand_by_hand() -> None:
    """Two sequences, four rows a page in K and in V: 3 rows growing to 6, and 4 rows growing to 5."""
    ledger = KVLedger(FOUR_A_PAGE, 4, 100 * PAGE, prompt_rows=100)
    assert (lend(ledger, 3, 3), lend(ledger, 4, 1)) == (0, 1)
    # step 0: 1 page and 1 page of each lane; step 1: 4 rows and 5 rows; then the second has ended: 5 and 6 rows
    assert ledger.demand().tolist() == [2 * PAGE * pages for pages in (1 + 1, 1 + 2, 2, 2)]
    assert ledger.peak_demand_bytes == 6 * PAGE and ledger.lent_bytes == 4 * PAGE


@given(LAYOUTS, SHAPES)
def test_demand_is_what_comes_when_all_go_on_in_step(layout: KVLayout, shapes: list[tuple[int, int]]) -> None:
    ledger = KVLedger(layout, len(shapes), 1 << 30, prompt_rows=10**6)
    slots = [lend(ledger, *shape) for shape in shapes]
    assert None not in slots
    foretold = ledger.demand().tolist()
    assert foretold == lockstep(layout, shapes)
    for step, bytes_ in enumerate(foretold):
        for slot, (prompt, _) in zip(slots, shapes, strict=True):
            if slot is not None and slot in ledger.accounts:
                ledger.grow(slot, prompt + step)
        assert ledger.lent_bytes == bytes_ == ledger.committed_bytes
        ledger.check()
        ledger.timetable.tick()
        for slot, (_, growth) in zip(slots, shapes, strict=True):
            if step == growth and slot is not None:
                ledger.close(slot, keep=False)
    assert not ledger.accounts and not ledger.demand().size


@given(LAYOUTS, SHAPES, st.integers(1, 60))
def test_peak_admits_exactly_what_the_formula_covers(
    layout: KVLayout, shapes: list[tuple[int, int]], pages: int
) -> None:
    """It is enough to look at the steps s = r_i at which someone ends: D only falls there."""
    ledger = KVLedger(layout, len(shapes), pages * 2 * PAGE, prompt_rows=10**6)
    admitted: list[tuple[int, int]] = []
    for shape in shapes:
        together = [*admitted, shape]
        demand = lockstep(layout, together)
        assert max(demand) == max(demand[growth] for _, growth in together)
        slot = lend(ledger, *shape)
        assert (slot is not None) == (max(demand) <= ledger.budget_bytes)
        if slot is not None:
            admitted.append(shape)
        ledger.check()


@given(LAYOUTS, SHAPES, st.integers(1, 60))
def test_reserve_admits_exactly_the_sum_of_all_maxima(
    layout: KVLayout, shapes: list[tuple[int, int]], pages: int
) -> None:
    ledger = KVLedger(layout, len(shapes), pages * 2 * PAGE, "reserve", prompt_rows=10**6)
    reserved = 0
    for prompt, growth in shapes:
        most = layout.committed(prompt + growth)
        admitted = lend(ledger, prompt, growth) is not None
        assert admitted == (reserved + most <= ledger.budget_bytes)
        reserved += most if admitted else 0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 40))
def test_safe_means_that_some_order_lets_all_finish(shapes: list[tuple[int, int]], pages: int) -> None:
    ledger = KVLedger(FOUR_A_PAGE, len(shapes), 1 << 30, prompt_rows=10**6)
    for shape in shapes:
        lend(ledger, *shape)
    ledger.budget_bytes = pages * 2 * PAGE
    bytes_ = FOUR_A_PAGE.committed

    def works(order: tuple[tuple[int, int], ...]) -> bool:
        free = ledger.budget_bytes - sum(bytes_(prompt) for prompt, _ in order)
        for prompt, growth in order:
            if free < 0 or bytes_(prompt + growth) - bytes_(prompt) > free:
                return False
            free += bytes_(prompt)
        return True

    assert ledger._safe() == any(map(works, permutations(shapes)))


def test_growth_that_leaves_no_safe_order_waits_for_the_older_one() -> None:
    """Two of 4 rows that may grow to 8, in a pool of 3 pages a lane: one of them may grow, the elder."""
    ledger = KVLedger(FOUR_A_PAGE, 2, 100 * PAGE, prompt_rows=100)
    slots = [lend(ledger, 4, 4), lend(ledger, 4, 4)]
    assert slots == [0, 1]
    for slot in (0, 1):
        ledger.grow(slot, 4)
    ledger.budget_bytes, ledger._strained = 3 * 2 * PAGE, 10**6
    assert ledger.must_wait([0, 1]) == {1}
    assert ledger.must_wait([1]) == set()


def test_a_booked_start_leaves_room_for_every_earlier_one() -> None:
    """Whoever waits can come in at any step between its booking and now without another's booking having to move."""
    ledger = KVLedger(FOUR_A_PAGE, 8, 8 * 2 * PAGE, prompt_rows=100)
    running = lend(ledger, 8, 16)
    first = ledger.book(8, 20, 0)
    second = ledger.book(4, 20, first.begin if first else 0)
    assert running == 0 and first and second and 0 < first.begin <= second.begin
    ledger.close(0, keep=False)
    early = ledger.start(8, 20, first)
    assert early is not None and early.begin == 0
    ledger.open("first", 8, 20, early)
    assert ledger.timetable.clash(second) is None or (ledger.timetable.ahead(0, 60)[BYTES] <= ledger.budget_bytes).all()
    for _ in range(second.begin):
        ledger.timetable.tick()
    assert ledger.start(4, 20, second) is not None


@pytest.mark.parametrize("rule", ["peak", "reserve"])
def test_a_start_is_refused_at_a_glance_only_where_it_does_not_fit(rule: Rule) -> None:
    rng, glances = random.Random(1), 0
    for _ in range(1000):
        ledger = KVLedger(FOUR_A_PAGE, rng.randint(2, 6), 2 * PAGE * rng.randint(13, 26), rule, rng.randint(1, 20))
        table, slots = ledger.timetable, []
        while (slot := lend(ledger, rng.randint(1, 20), rng.randint(0, 30))) is not None:
            slots.append(slot)
        prompt, rows_max = rng.randint(1, 20), rng.randint(20, 50)
        booked = ledger.book(prompt, rows_max, 0)
        while booked and booked.begin > table.now:
            glance = ledger._refused(prompt, rows_max, booked)
            table.remove(booked)
            clash = table.clash(ledger.plan(prompt, prompt, rows_max, table.now))
            table.add(booked)
            assert clash is not None or not glance
            booked.refused, glances = clash or -1, glances + glance
            if slots and rng.random() < 0.5:
                ledger.close(slots.pop(rng.randrange(len(slots))), keep=False)
            table.tick()
    assert glances > 1000


def test_what_was_in_the_way_of_a_start_is_remembered() -> None:
    """A glance at one step in place of a plan, for as long as that step is too full."""
    ledger = KVLedger(FOUR_A_PAGE, 4, 6 * 2 * PAGE, prompt_rows=100)
    assert (lend(ledger, 4, 16), lend(ledger, 4, 8)) == (0, 1)
    booked = ledger.book(4, 20, 0)
    assert booked and ledger.start(4, 20, booked) is None and booked.refused > 0
    assert not ledger.timetable.full(0, ledger._bytes[4], booked) and ledger._refused(4, 20, booked)
    ledger.close(0, keep=False)
    assert not ledger._refused(4, 20, booked) and ledger.start(4, 20, booked) is not None


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), max_size=8), st.integers(1, 9))
def test_prompt_rows_are_spread_over_what_others_leave(prompts: list[tuple[int, int]], limit: int) -> None:
    table = Timetable(1 << 30, 100, limit)
    ledger = KVLedger(FOUR_A_PAGE, 100, 1 << 30, prompt_rows=limit)
    table = ledger.timetable
    for begin, rows in prompts:
        spread = table.spread(rows, begin)
        assert sum(spread) == rows and spread[-1] > 0
        before = table.ahead(begin, len(spread))[PROMPT].copy()
        assert all(part <= max(0, limit - taken) for part, taken in zip(spread, before.tolist(), strict=True))
        assert all(part == limit - taken for part, taken in zip(spread[:-1], before.tolist()[:-1], strict=True))
        table.add(ledger.plan(rows, rows, rows, begin))
    assert (table.ahead(0, 200)[PROMPT] <= limit).all()


def test_the_timetable_forgets_the_past_and_grows_into_the_future() -> None:
    ledger = KVLedger(FOUR_A_PAGE, 4, 1 << 30, prompt_rows=1)
    table = ledger.timetable
    far = ledger.plan(10, 10, 60, 9000)
    table.add(far)
    for _ in range(9030):
        table.tick()
    assert table.ahead(table.now, 31)[SEATS].tolist() == [1] * 30 + [0]
    table.remove(far)
    assert not table.ahead(table.now, 10_000).any()


def test_residents_go_least_recently_used_first_and_only_when_wanted() -> None:
    ledger = KVLedger(FOUR_A_PAGE, 3, 6 * 2 * PAGE, prompt_rows=100)
    for slot in range(3):
        assert lend(ledger, 8, 0) == slot
        ledger.grow(slot, 8)
        ledger.close(slot, keep=True)
    assert ledger.free_slots == 3 and ledger.committed_bytes == 6 * 2 * PAGE and not ledger.lent_bytes
    ledger.touch(0)
    plan = ledger.start(8, 8, None)
    assert plan is not None
    slot, given_up = ledger.open("y", 8, 8, plan)
    assert (slot, given_up) == (1, [1]) and list(ledger.resident) == [2, 0]
    ledger.check()
    plan = ledger.start(12, 12, None)
    assert plan is not None
    slot, given_up = ledger.open("z", 12, 12, plan, slot=0)
    assert (slot, given_up) == (0, [2])
    ledger.check()


def test_the_cost_of_a_step_and_of_a_row_is_learned() -> None:
    cost = StepCost()
    for step in range(200):
        rows = 1 + step % 37
        cost.observe(rows, 0.02 + 0.001 * rows)
    assert cost.base == pytest.approx(0.02, rel=1e-3) and cost.slope == pytest.approx(0.001, rel=1e-3)
    assert cost.rows_within(0.05, 1000) in (29, 30) and cost.rows_within(0.01, 1000) == 0
    assert cost.rows_within(9.0, 64) == 64
    cost.observe(10, 100.0)  # the machine slept
    assert cost.predict(10) < 0.06


def test_a_cost_that_never_varies_is_a_row_alike() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(8, 0.04)
    assert cost.predict(8) == pytest.approx(0.04)
    assert cost.rows_within(1.0, 64) == 0  # nobody knows what a row more would cost


def test_what_a_row_costs_is_not_forgotten_while_all_steps_are_alike() -> None:
    cost = StepCost()
    for rows in [8, 40] * 50:
        cost.observe(rows, 0.004 + 0.0005 * rows)
    for _ in range(2_000):
        cost.observe(8, 0.006)  # dearer meanwhile
    assert cost.slope == pytest.approx(0.0005, rel=0.2) and cost.predict(8) == pytest.approx(0.006, rel=1e-3)


def test_that_rows_cost_nothing_is_never_learned() -> None:
    cost = StepCost()
    for rows in [8, 40] * 50:
        cost.observe(rows, 0.004 + 0.0005 * rows)
    for rows in [40, 30, 20, 10, 5, 2] * 4:  # the last of many clients: fewer rows, but their goodbyes take time
        cost.observe(rows, 0.03 - 0.0002 * rows)
    assert cost.slope > 0.0 and cost.predict(20) == pytest.approx(0.026, rel=0.3)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 0.5)), min_size=1, max_size=80))
def test_no_step_ever_seems_to_cost_less_than_nothing(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
        assert cost.base >= 0.0 <= cost.slope
    mean = cost._y / cost._n
    assert cost.predict(cost._x / cost._n) == pytest.approx(mean), "the line goes through the middle of what was seen"


@pytest.mark.parametrize(("gap", "rows"), [(None, 9), (0.05, 32), (0.001, 4), (10.0, 64)])
def test_prompts_get_the_rows_that_leave_the_tokens_their_pace(gap: float | None, rows: int) -> None:
    """A step costs 10 ms and 1 ms a row; 8 decode: 18 ms, half more is 27. 4 rows are sure, 64 are the most."""
    layout = KVLayout(1, 1, 64, 64)
    scheduler = Scheduler(KVLedger(layout, 2, 4 * layout.committed(64), prompt_rows=4), 64, token_gap_s=gap)
    assert scheduler._prefill_budget(8, 1) == 4  # nothing is known yet
    for computed in [8, 40] * 50:
        scheduler.cost.observe(computed, 0.01 + 0.001 * computed)
    assert scheduler._prefill_budget(8, 1) in (rows, rows - 1) and scheduler._prefill_budget(0, 1) == 64
    if gap is None:  # 18 ms and half as much for each of three prompts
        assert scheduler._prefill_budget(8, 3) in (26, 27) and scheduler._prefill_budget(8, 99) == 64


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 70))
def test_common_prefix_is_the_longest(one: list[int], other: list[int], limit: int) -> None:
    plain = 0
    while plain < min(len(one), len(other), limit) and one[plain] == other[plain]:
        plain += 1
    assert common_prefix(one, other, limit) == plain
    assert common_prefix([7] * 30 + one, [7] * 30 + other, 30 + limit) == 30 + plain


def test_a_table_is_made_of_whole_numbers() -> None:
    assert KVLedger(FOUR_A_PAGE, 1, PAGE).timetable.limits.dtype == np.int64


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40))
def test_survival_is_the_product_of_the_chances_to_go_on(seen: list[tuple[int, bool]]) -> None:
    used, by_itself = np.array([rows for rows, _ in seen]), np.array([ended for _, ended in seen])
    plain, chance = [], 1.0
    for length in range(13):
        at_risk = sum(rows >= length for rows, _ in seen)
        ended = sum(rows == length and itself for rows, itself in seen)
        chance *= 1 - ended / at_risk if at_risk else 1.0
        plain.append(chance)
    assert survival(used, by_itself, 12) == pytest.approx(plain)


def test_those_that_were_cut_or_still_run_do_not_make_answers_look_short() -> None:
    """Half end by themselves at 100; the others were cut at 10, or have just begun."""
    used = np.array([100] * 50 + [10] * 25 + [3] * 25)
    by_itself = used == 100
    chance = survival(used, by_itself, 200)
    assert chance[99] == 1.0 and chance[100] == 0.0


CLAIMS = st.lists(  # rows held, of these grown, still to come, steps until then
    st.tuples(st.integers(10, 20), st.integers(0, 10), st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=5
)


@given(CLAIMS, st.lists(st.floats(0, 1), min_size=64, max_size=64))
def test_expected_demand_is_no_less_than_a_plain_sum_at_any_step_of_the_grid(
    claims: list[tuple[int, int, int, int]], hazard: list[float]
) -> None:
    chance = np.cumprod(1 - np.array(hazard) / 8)
    curve = np.array([FOUR_A_PAGE.committed(rows) for rows in range(65)])
    chance = np.append(chance, chance[-1])
    empty = Expected(chance, curve)
    together = empty.add(np.array(claims))
    one_by_one = empty
    for claim in claims:
        one_by_one = one_by_one.add(np.array([claim]))
    assert one_by_one.mean == pytest.approx(together.mean) and one_by_one.peak(2) == pytest.approx(together.peak(2))
    for at in range(0, 128, Expected.GRID):
        mean = 0.0
        for rows, grown, left, delay in claims:
            steps = max(0, at - delay)
            if steps <= left:
                mean += chance[grown + steps] / chance[grown] * curve[rows + steps]
        assert together.mean[at // Expected.GRID] >= mean * 0.999999
    assert together.peak(3) >= together.peak(0)


def learning(pages: int, used: int) -> KVLedger:
    """A ledger under the rule `learned` whose clients have all ended by themselves after `used` rows."""
    ledger = KVLedger(FOUR_A_PAGE, 20, pages * 2 * PAGE, "learned", prompt_rows=1000)
    for _ in range(KNOWN):
        ledger.usage.ended(used, by_itself=True)
    return ledger


def test_learned_lends_beyond_the_peak_what_is_not_used_but_keeps_a_safe_order() -> None:
    counts = {}
    for used in (2, 60):
        ledger = learning(30, used)
        while lend(ledger, 8, 40) is not None:
            ledger.check()
        counts[used] = len(ledger.accounts)
        assert ledger._safe()
    # 30 pages hold two of 12 pages; if each ends within its third page, there is room until no order would be safe
    assert counts == {2: 10, 60: 2}
    fresh = KVLedger(FOUR_A_PAGE, 20, 30 * 2 * PAGE, "learned", prompt_rows=1000)
    while lend(fresh, 8, 40) is not None:
        pass
    assert len(fresh.accounts) == 2, "without a past it lends as `peak` does"


def test_learned_falls_back_to_the_peak_while_much_is_sat_out() -> None:
    ledger = learning(30, 2)
    for slot in range(10):
        assert lend(ledger, 8, 40) == slot
        ledger.grow(slot, 8)
    waiting = ledger.must_wait(list(range(10)))
    assert waiting and 0 not in waiting and len(waiting) < 10
    for slot in range(9, 5, -1):
        ledger.close(slot, keep=False)
    assert lend(ledger, 8, 40) is None
    for _ in range(int(len(waiting) / ledger.HELD)):
        ledger.must_wait([])
    assert lend(ledger, 8, 40) is not None
