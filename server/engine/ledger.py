"""KVLedger: who holds which slot and how many bytes, now and at every coming step. It lends only what is covered.

A `Plan` is what one sequence takes at each coming step if it uses all that it asked for: a seat, bytes (its prompt in
full from its first step on, then one row more a step), and rows of prompt to compute. The `Timetable` is the sum of
all plans, of those that run and of those that wait and were told a time. With D(t) its bytes at step t, nothing is lent
unless D(t) <= pool at every t. So whoever was admitted can finish, and whoever waits gets its slot no later than told.

The rule `learned` lends beyond that, as long as all can still finish one after another: it gives up the second promise,
not the first. A sequence may then sit out a step, and a time that was told holds only if clients go on as they did.
Torch-free.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.usage import Expected, Usage

Rule = Literal["peak", "reserve", "learned"]
SURE_ROWS = 16  # prompt rows that every step computes if there are so many, whatever the tokens' pace
Table = NDArray[np.int64]

BYTES, SEATS, PROMPT = 0, 1, 2  # the rows of a timetable


@dataclass(slots=True, eq=False)
class Plan:
    """What a sequence takes of each resource at steps begin, begin + 1, ...: `take` [3, steps].

    Its prompt is computed in step `ready`, out of which comes its first token; it is gone after step `end`. A start
    in place of a booked one was refused, the last time, because of step `refused`.
    """

    begin: int
    ready: int
    take: Table
    refused: int = -1

    @property
    def end(self) -> int:
        return self.begin + self.take.shape[1] - 1

    def prompt_rows(self, step: int) -> int:
        """Rows of its prompt that it is sure to get computed in `step`."""
        at = step - self.begin
        return int(self.take[PROMPT, at]) if 0 <= at < self.take.shape[1] else 0


class Timetable:
    """What all plans together take at each step from `now` on: [3, steps], grown and shifted as time goes by."""

    def __init__(self, pool_bytes: int, slots: int, prompt_rows: int) -> None:
        self.now = 0
        self.limits = np.array([[pool_bytes], [slots], [prompt_rows]], np.int64)
        self._sums = np.zeros((3, 4096), np.int64)
        self._base = 0  # the step of the first column

    def tick(self) -> None:
        """One step has been computed."""
        self.now += 1
        if self.now - self._base == self._sums.shape[1] // 2:
            past = self.now - self._base
            self._sums = np.concatenate([self._sums[:, past:], np.zeros((3, past), np.int64)], axis=1)
            self._base = self.now

    def ahead(self, begin: int, steps: int) -> Table:
        """The sums of `steps` steps from `begin` on, a view [3, steps]."""
        at = begin - self._base
        while at + steps > self._sums.shape[1]:
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)], axis=1)
        return self._sums[:, at : at + steps]

    def add(self, plan: Plan, sign: int = 1) -> None:
        """Books a plan, or with sign -1 takes it back, from now on; what is past is past."""
        take = plan.take[:, max(0, self.now - plan.begin) :]
        self.ahead(max(plan.begin, self.now), take.shape[1])[...] += sign * take

    def remove(self, plan: Plan) -> None:
        self.add(plan, -1)

    def full(self, step: int, bytes_: int, booked: Plan | None) -> bool:
        """Whether there is no seat or no room for `bytes_` in that step, beside all plans but the booked one."""
        column = self._sums[:, step - self._base]
        own = booked.take[:, step - booked.begin] if booked and booked.begin <= step <= booked.end else (0, 0)
        over = column[SEATS] - own[SEATS] >= self.limits[SEATS, 0]
        return bool(over or column[BYTES] - own[BYTES] + bytes_ > self.limits[BYTES, 0])

    def spread(self, rows: int, begin: int) -> list[int]:
        """How `rows` rows of a prompt fit between those of others, from step `begin` on: rows in each step."""
        limit, steps = int(self.limits[PROMPT, 0]), 8
        spread: list[int] = []
        while rows:
            for taken in self.ahead(begin, steps)[PROMPT][len(spread) :].tolist():
                part = min(rows, max(0, limit - taken))
                spread.append(part)
                rows -= part
                if not rows:
                    break
            steps *= 2
        return spread

    def clash(self, plan: Plan) -> int | None:
        """The last step at which the plan asks for more bytes or seats than are left; None when it fits."""
        sums = self.ahead(plan.begin, plan.take.shape[1])
        over = plan.take[:PROMPT] + sums[:PROMPT] > self.limits[:PROMPT]  # [2, steps]
        if not over.any():
            return None
        return plan.begin + int(np.flatnonzero(over.any(axis=0))[-1])


@dataclass(slots=True)
class Account:
    """One slot's holder: `prompt` rows are lent at once, then one a step up to `rows_max`; `rows` are in the pool.

    Up to `room` rows cost no more bytes than `rows` do.
    """

    owner: str
    prompt: int
    rows_max: int
    plan: Plan
    rows: int = 0
    room: int = 0

    @property
    def lent(self) -> int:
        return max(self.rows, self.prompt)

    @property
    def grown(self) -> int:
        return max(0, self.rows - self.prompt)


class KVLedger:
    """Slots and bytes. A slot is free, lent to a running sequence (`accounts`), or `resident`: kept for its prefix, and
    given up, least recently used first, as soon as its seat or its bytes are wanted."""

    HORIZON = 2**16  # steps ahead for which a time is told
    DEVIATIONS = 3.0  # of the expected demand, that `learned` leaves room for
    HELD = 0.0005  # share of its sequences' steps that `learned` may let be sat out

    def __init__(
        self, layout: KVLayout, slots: int, budget_bytes: int, rule: Rule = "peak", prompt_rows: int = 32
    ) -> None:
        """prompt_rows: rows of prompts that every step can surely compute."""
        self.layout = layout
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.rule = rule
        self.accounts: dict[int, Account] = {}
        self.resident: dict[int, int] = {}  # slot -> rows, least recently used first
        self.sure_rows = prompt_rows
        self.timetable = Timetable(budget_bytes, slots, prompt_rows)
        self._bytes = [layout.committed(rows) for rows in range(layout.max_context + 1)]
        self._curve = np.array(self._bytes, np.int64)
        self._room = (np.searchsorted(self._curve, self._curve, "right") - 1).tolist()  # rows for the bytes of so many
        self._free = list(range(slots))  # a heap: the lowest free slot is lent first
        self._lent = self._kept = self._committed = 0
        self.usage = Usage(layout.max_context)
        self._changes = 0  # how often a slot was lent or came back
        self._foreseen: tuple[tuple[int, int], Expected | None] = ((-1, 0), None)  # (at which step, after how many)
        self._debt = 0.0  # steps sat out beyond that share
        self._strained = -1  # the last step at which the plans together take too much, because some had to change

    @property
    def free_slots(self) -> int:
        """Slots that can be had: free ones, and those kept only for their prefix."""
        return len(self._free) + len(self.resident)

    @property
    def committed_bytes(self) -> int:
        """Bytes of all rows in the pool, running and resident: what the pool's mapping really takes."""
        return self._committed + self._kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of resident rows, which go as soon as they are wanted."""
        return self._kept

    @property
    def lent_bytes(self) -> int:
        """Bytes of the rows that running sequences have, prompts counted in full."""
        return self._lent

    @property
    def peak_demand_bytes(self) -> int:
        """The most that the running sequences can come to take together at any step: max D(t)."""
        return int(self.demand().max(initial=0))

    def demand(self) -> Table:
        """D(t) of the running sequences for t = now, now + 1, ... until the last of them has ended, in bytes."""
        now, plans = self.timetable.now, [account.plan for account in list(self.accounts.values())]
        sums = np.zeros(max((plan.end + 1 - now for plan in plans), default=0), np.int64)
        for plan in plans:
            take = plan.take[BYTES, max(0, now - plan.begin) :]
            sums[: len(take)] += take
        return sums

    # Plans

    def plan(self, held: int, prompt_rows: int, rows_max: int, begin: int) -> Plan:
        """From step `begin` on: `held` rows flat while `prompt_rows` of them are computed, then growing to rows_max."""
        lane = self.timetable.spread(prompt_rows, begin)
        flat, steps = len(lane), len(lane) + rows_max - held
        take = np.zeros((3, steps), np.int64)
        take[BYTES, :flat] = self._bytes[held]
        take[BYTES, flat:] = self._curve[held + 1 : rows_max + 1]
        if self.rule == "reserve":
            take[BYTES] = self._bytes[rows_max]
        take[SEATS] = 1
        take[PROMPT, :flat] = lane
        return Plan(begin, begin + flat - 1, take)

    def book(self, prompt: int, rows_max: int, earliest: int) -> Plan | None:
        """Books a start at the first step from `earliest` on that leaves all others their plans; None beyond HORIZON.

        From its start on, the booking takes at each step what the sequence would have if it had started now. So it
        covers every start between now and then, and whoever is let in early stays within its own booking from the
        booked step on: nobody's early start can be in the way of another's booked one.
        """
        begin, now = earliest, self.timetable.now
        while begin - now <= self.HORIZON:
            plan = self.plan(prompt, prompt, rows_max, begin)
            grown = min(prompt + begin - now, rows_max)
            cover = self._curve[grown : min(grown + plan.take.shape[1], rows_max + 1)]
            plan.take[BYTES] = self._bytes[rows_max]
            if self.rule != "reserve":
                plan.take[BYTES, : len(cover)] = cover
            clash = self.timetable.clash(plan)
            if clash is None:
                self.timetable.add(plan)
                return plan
            begin = clash + 1
        return None

    def start(self, prompt: int, rows_max: int, booked: Plan | None) -> Plan | None:
        """A plan that begins now, booked in place of `booked`; None when it does not fit."""
        now, learned = self.timetable.now, self.rule == "learned"
        if not self.free_slots or (not learned and self._refused(prompt, rows_max, booked)):
            return None
        if booked:
            self.timetable.remove(booked)
        plan = self.plan(prompt, prompt, rows_max, now)
        clash = self.timetable.clash(plan)
        if clash is None and (not self.strained or self._safe(newcomer=(prompt, rows_max))):
            self.timetable.add(plan)
            return plan
        if learned and self._expected_to_fit(plan, prompt, rows_max):
            self._strained = max(self._strained, now if clash is None else clash)
            self.timetable.add(plan)
            return plan
        if booked:
            booked.refused = -1 if clash is None else clash
            self.timetable.add(booked)
        return None

    def _refused(self, prompt: int, rows_max: int, booked: Plan | None) -> bool:
        """Whether a start is sure not to fit: now, or at the step that was in its way the last time. A quick look."""
        table, least = self.timetable, rows_max if self.rule == "reserve" else prompt
        if table.full(table.now, self._bytes[least], booked):
            return True
        ahead = booked.refused - table.now if booked else 0
        if not booked or not 0 < ahead <= rows_max - prompt:
            return False
        slowest = len(table.spread(prompt, table.now))  # what is booked for itself may still be in the way there
        rows = max(least, prompt + ahead + 1 - slowest)
        return table.full(booked.refused, self._bytes[rows], booked)

    def _expected_to_fit(self, plan: Plan, prompt: int, rows_max: int) -> bool:
        """`learned`: the state stays safe, few were held lately, and what clients use as a rule will fit."""
        if self._debt > 0 or not self._safe(newcomer=(prompt, rows_max)):
            return False
        expected = self._expected()
        if expected is None:
            return False
        newcomer = np.array([(prompt, 0, rows_max - prompt, plan.ready - plan.begin)])
        return expected.add(newcomer).peak(self.DEVIATIONS) <= self.budget_bytes

    def _expected(self) -> Expected | None:
        """What those that run can be expected to take from now on; None while too little is known."""
        now = self.timetable.now
        if self._foreseen[0] != (now, self._changes):
            accounts = self.accounts.values()
            survival = self.usage.survival([account.grown for account in accounts])
            expected = None
            if survival is not None:
                claims = [(a.lent, a.grown, a.rows_max - a.lent, max(0, a.plan.ready - now)) for a in accounts]
                expected = Expected(survival, self._curve).add(np.array(claims, np.int64).reshape(-1, 4))
            self._foreseen = ((now, self._changes), expected)
        return self._foreseen[1]

    def clash_with_running(self, prompt: int, rows_max: int) -> tuple[str, int] | None:
        """What keeps a start out right now, of what the running sequences may come to take, and at which step.

        'slot' or 'kv_bytes'; None when it would fit beside them, and only those that wait were told the room for it.
        """
        now = self.timetable.now
        plan = self.plan(prompt, prompt, rows_max, now)
        sums = plan.take[:PROMPT].copy()  # [2, steps]
        for account in self.accounts.values():
            take = account.plan.take[:PROMPT, max(0, now - account.plan.begin) :][:, : sums.shape[1]]
            sums[:, : take.shape[1]] += take
        over = sums > self.timetable.limits[:PROMPT]
        if not over.any():
            return None
        at = int(np.flatnonzero(over.any(axis=0))[-1])
        return "slot" if over[SEATS, at] else "kv_bytes", now + at

    def replan(self, slot: int, prompt_rows: int, force: bool, still: int = 0) -> bool:
        """Plans a running sequence anew from now on; kept only where it fits, or by force.

        prompt_rows: rows of its prompt still to compute. still: steps for which it may not go on (its reader is
        slow); it is then planned with its maximum throughout, so that it may go on at any time.
        """
        account, now = self.accounts[slot], self.timetable.now
        plan = self.plan(account.lent, prompt_rows, account.rows_max, now)
        if still:
            take = np.repeat(plan.take[:, -1:], still + plan.take.shape[1], axis=1)
            take[BYTES] = self._bytes[account.rows_max]
            plan = Plan(now, now + still, take)
        self.timetable.remove(account.plan)
        clash = self.timetable.clash(plan)
        if clash is not None:
            if not force and self.rule != "learned":
                self.timetable.add(account.plan)
                return False
            self._strained = max(self._strained, clash)
        self.timetable.add(plan)
        account.plan = plan
        return True

    # Slots and rows

    def open(
        self, owner: str, prompt: int, rows_max: int, plan: Plan, slot: int | None = None
    ) -> tuple[int, list[int]]:
        """Lends a slot under a booked plan: that resident one, or the lowest free. Also the slots given up for it."""
        self._changes += 1
        if slot is not None:
            self._kept -= self._bytes[self.resident.pop(slot)]
        self._lent += self._bytes[prompt]
        given_up = self.make_room(0, slots=0 if slot is not None else 1)
        if slot is None:
            slot = heapq.heappop(self._free)
        self.accounts[slot] = Account(owner, prompt, rows_max, plan)
        return slot, given_up

    def make_room(self, growth: int, slots: int = 0) -> list[int]:
        """Gives up residents until `slots` slots are free and `growth` bytes more are. Returns the slots given up."""
        given_up = []
        while self.resident and (len(self._free) < slots or self._lent + self._kept + growth > self.budget_bytes):
            slot = next(iter(self.resident))
            self.give_up(slot)
            given_up.append(slot)
        return given_up

    def give_up(self, slot: int) -> None:
        """A resident slot becomes free."""
        self._kept -= self._bytes[self.resident.pop(slot)]
        heapq.heappush(self._free, slot)

    def touch(self, slot: int) -> None:
        """A resident slot was of use: it is the last to go."""
        self.resident[slot] = self.resident.pop(slot)

    def can_keep(self, slot: int, prompt: int) -> bool:
        """Whether a resident slot can stay while another one is lent for a prompt of `prompt` rows."""
        together = self._lent + self._bytes[prompt] + self._bytes[self.resident[slot]]
        return self.free_slots > 1 and together <= self.budget_bytes

    def grow(self, slot: int, rows: int) -> None:
        """The holder of `slot` now has `rows` rows in the pool."""
        account = self.accounts[slot]
        before, bytes_ = account.rows, self._bytes
        assert before <= rows <= account.rows_max, (slot, account, rows)
        account.rows = rows
        account.room = min(self._room[rows], account.rows_max)
        self._committed += bytes_[rows] - bytes_[before]
        if rows > account.prompt:
            self._lent += bytes_[rows] - bytes_[max(before, account.prompt)]

    def close(self, slot: int, keep: bool, by_itself: bool = False) -> None:
        """The sequence has ended: bytes, seat and the rest of its plan are free; its rows may stay for reuse."""
        account = self.accounts.pop(slot)
        self._changes += 1
        self.usage.ended(account.grown, by_itself)
        self._lent -= self._bytes[account.lent]
        self._committed -= self._bytes[account.rows]
        self.timetable.remove(account.plan)
        if keep and account.rows:
            self.resident[slot] = account.rows
            self._kept += self._bytes[account.rows]
        else:
            heapq.heappush(self._free, slot)

    # The safety net

    @property
    def strained(self) -> bool:
        """Whether the plans take too much at some step: someone fell behind. While not, every state is safe."""
        return self._strained >= self.timetable.now

    def ahead(self, slot: int) -> bool:
        """Whether one more row would be more than the plan has for the holder of `slot` in this step."""
        account = self.accounts[slot]
        at, bytes_ = self.timetable.now - account.plan.begin, self._bytes[account.rows + 1]
        return at < account.plan.take.shape[1] and bytes_ > account.plan.take[BYTES, at]

    def rows_for_nothing(self, slot: int) -> int:
        """How many rows the holder of `slot` may have after its next one for not a byte more."""
        account = self.accounts[slot]
        after = account.rows + 1
        return min(self._room[after], account.rows_max) - after

    def growth(self, slot: int) -> int:
        """Bytes that one more row costs the holder of `slot`, whose prompt is computed."""
        rows = self.accounts[slot].rows
        return self._bytes[rows + 1] - self._bytes[rows]

    def must_wait(self, growing: list[int]) -> set[int]:
        """Of the slots that are to grow by a row, oldest first: those whose growth would leave no safe order.

        The banker's algorithm (Dijkstra 1965): a state is safe when all can finish one after another, the smallest
        remaining need first, each from what is free and what those before it gave back.
        """
        self._debt = max(0.0, self._debt - self.HELD * len(self.accounts))
        if not self.strained or self._safe(growing):
            return set()
        grown: list[int] = []
        for slot in growing:
            if self._safe([*grown, slot]):
                grown.append(slot)
        self._debt += len(growing) - len(grown)
        return set(growing) - set(grown)

    def _safe(self, grown: Sequence[int] = (), newcomer: tuple[int, int] = (0, 0)) -> bool:
        """Whether the state is safe once the slots in `grown` have a row more and a newcomer (rows, rows_max) is in."""
        bytes_, growing = self._bytes, set(grown)
        claims = [(bytes_[newcomer[1]] - bytes_[newcomer[0]], bytes_[newcomer[0]])]
        for slot, account in self.accounts.items():
            held = bytes_[max(account.rows, account.prompt) + (slot in growing)]
            claims.append((bytes_[account.rows_max] - held, held))
        free = self.budget_bytes - sum([held for _, held in claims])
        if free < 0:
            return False
        claims.sort()
        most = claims[-1][0]
        for need, held in claims:
            if free >= most:
                return True
            if need > free:
                return False
            free += held
        return True

    def check(self) -> None:
        """Proves conservation: every slot in one place, every sum equal to its parts, nothing beyond the pool."""
        bytes_, accounts = self._bytes, self.accounts.values()
        assert sorted([*self._free, *self.accounts, *self.resident]) == list(range(self.slots))
        assert all(0 <= a.rows <= a.room <= a.rows_max and a.prompt <= a.rows_max for a in accounts)
        assert all(bytes_[a.room] == bytes_[a.rows] for a in accounts)
        assert self._committed == sum(bytes_[a.rows] for a in accounts)
        assert self._lent == sum(bytes_[a.lent] for a in accounts)
        assert self._kept == sum(bytes_[rows] for rows in self.resident.values())
        assert self._committed <= self._lent
        assert self._lent + self._kept <= self.budget_bytes
        assert self._safe()
