"""Admission: who may start now, and when everyone else can at the latest.

Every waiting request has an advance reservation on the timeline, as in the conservative backfilling of batch schedulers
(Mu'alem and Feitelson 2001): a later one may start before an earlier one if that delays no reservation. With D(t) the
bytes demanded at step t, of running sequences and reservations, D(t) <= pool holds at every t. So whoever was admitted
can finish, and whoever waits starts no later than reported.

The rule `learned` admits beyond that what clients will probably not use, as long as all can still finish one after
another. A sequence may then stall for a step, and a reported time holds only if clients go on as they did. Torch-free.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tokenteller.server.engine.banker import Banker
from tokenteller.server.engine.demand import BYTES, PROMPT, SLOTS, Amounts, Demand, DemandModel, Timeline
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.output_lengths import ExpectedDemand, OutputLengths
from tokenteller.server.engine.sequence import NEVER, Sequence

Rule = Literal["peak", "reserve", "learned"]
SURE_ROWS = 16  # prompt rows that every step can compute, whatever the token gap


class Admission:
    """Reserves, starts and ends sequences on the timeline, under one of the rules."""

    HORIZON = 2**16  # steps ahead for which a start is reserved
    DEVIATIONS = 3.0  # of the expected demand, kept free by `learned`
    STALLED = 0.0005  # share of all sequences' steps that `learned` may let stall

    def __init__(self, ledger: KVLedger, rule: Rule = "peak", prompt_rows: int = 32) -> None:
        """prompt_rows: prompt rows that every step is sure to compute."""
        self.ledger = ledger
        self.rule = rule
        self.sure_rows = prompt_rows
        self.timeline = Timeline(ledger.budget_bytes, ledger.slots, prompt_rows)
        self.model = DemandModel(ledger.curve, self.timeline, flat=rule == "reserve")
        self.banker = Banker(ledger)
        self.output_lengths = OutputLengths(ledger.layout.max_context)
        self._oversubscribed_until = -1  # the last step at which demands exceed the limits
        self._stalled = 0.0  # steps stalled beyond the share allowed
        self._changes = 0  # starts and ends so far
        self._expected: tuple[tuple[int, int], ExpectedDemand | None] = ((-1, 0), None)  # (step, changes) it holds for

    # What is to come

    @property
    def oversubscribed(self) -> bool:
        """Whether demands exceed the limits at some coming step. While they do not, every state is safe."""
        return self._oversubscribed_until >= self.timeline.now

    @property
    def peak_demand_bytes(self) -> int:
        """The most that the running sequences can come to hold together at any step: max D(t)."""
        return int(self.running_demand().max(initial=0))

    def running_demand(self) -> Amounts:
        """D(t) in bytes of the running sequences for t = now, now + 1, ... until the last has ended."""
        now, demands = self.timeline.now, [a.demand for a in list(self.ledger.allocations.values())]
        total = np.zeros(max((demand.end + 1 - now for demand in demands), default=0), np.int64)
        for demand in demands:
            amounts = demand.from_step(now)[BYTES]
            total[: len(amounts)] += amounts
        return total

    def blocker(self, prompt: int, rows_max: int) -> tuple[str, int] | None:
        """Which resource, 'slot' or 'kv_bytes', the running sequences alone leave too little of for a start now, and at
        which step; None when it would fit beside them, so that only reservations are in its way."""
        now = self.timeline.now
        demand = self.model.running(prompt, prompt, rows_max, now)
        total = demand.amounts[:PROMPT].copy()  # [2, steps]
        for allocation in self.ledger.allocations.values():
            amounts = allocation.demand.from_step(now)[:PROMPT, : total.shape[1]]
            total[:, : amounts.shape[1]] += amounts
        over = total > self.timeline.limits[:PROMPT]
        if not over.any():
            return None
        at = int(np.flatnonzero(over.any(axis=0))[-1])
        return "slot" if over[SLOTS, at] else "kv_bytes", now + at

    # Starts

    def reserve(self, prompt: int, rows_max: int, earliest: int) -> Demand | None:
        """Reserves the first start from `earliest` on that delays nobody; None beyond HORIZON."""
        begin = earliest
        while begin - self.timeline.now <= self.HORIZON:
            demand = self.model.reserved(prompt, rows_max, begin)
            conflict = self.timeline.last_conflict(demand)
            if conflict is None:
                self.timeline.add(demand)
                return demand
            begin = conflict + 1
        return None

    def start(self, prompt: int, rows_max: int, reservation: Demand | None) -> Demand | None:
        """The demand of a start now, put on the timeline in place of the reservation; None when it does not fit."""
        now, timeline = self.timeline.now, self.timeline
        learned = self.rule == "learned"
        if not self.ledger.free_slots or (not learned and self._cannot_fit(prompt, rows_max, reservation)):
            return None
        if reservation:
            timeline.remove(reservation)
        demand = self.model.running(prompt, prompt, rows_max, now)
        conflict = timeline.last_conflict(demand)
        fits = conflict is None and (not self.oversubscribed or self.banker.safe(newcomer=(prompt, rows_max)))
        if not fits and learned and self._expected_to_fit(demand, prompt, rows_max):
            self._oversubscribed_until = max(self._oversubscribed_until, now if conflict is None else conflict)
            fits = True
        if fits:
            timeline.add(demand)
            self._changes += 1
            return demand
        if reservation:
            reservation.conflict = -1 if conflict is None else conflict
            timeline.add(reservation)
        return None

    def _cannot_fit(self, prompt: int, rows_max: int, reservation: Demand | None) -> bool:
        """A cheap look at two steps, now and the one that ruled a start out last time. True only if it cannot fit."""
        timeline, bytes_of = self.timeline, self.ledger.bytes_of
        least = rows_max if self.rule == "reserve" else prompt
        if timeline.is_full(timeline.now, bytes_of[least], reservation):
            return True
        ahead = reservation.conflict - timeline.now if reservation else 0
        if not reservation or not 0 < ahead <= rows_max - prompt:
            return False
        prefill = len(timeline.spread_prompt(prompt, timeline.now))  # at most: its own reservation is still counted
        rows = max(least, prompt + ahead + 1 - prefill)
        return timeline.is_full(reservation.conflict, bytes_of[rows], reservation)

    def _expected_to_fit(self, demand: Demand, prompt: int, rows_max: int) -> bool:
        """`learned`: the state stays safe, few stalled lately, and what clients use as a rule will fit."""
        if self._stalled > 0 or not self.banker.safe(newcomer=(prompt, rows_max)):
            return False
        expected = self._expected_now()
        if expected is None:
            return False
        newcomer = np.array([(prompt, 0, rows_max - prompt, demand.ready - demand.begin)])
        return expected.add(newcomer).peak(self.DEVIATIONS) <= self.ledger.budget_bytes

    def _expected_now(self) -> ExpectedDemand | None:
        """What the running sequences will probably hold; None while too little is known."""
        now = self.timeline.now
        if self._expected[0] != (now, self._changes):
            running = self.ledger.allocations.values()
            survival = self.output_lengths.survival([a.generated_rows for a in running])
            expected = None
            if survival is not None:
                claims = [
                    (a.charged_rows, a.generated_rows, a.rows_max - a.charged_rows, max(0, a.demand.ready - now))
                    for a in running
                ]
                expected = ExpectedDemand(survival, self.ledger.curve).add(np.array(claims, np.int64).reshape(-1, 4))
            self._expected = ((now, self._changes), expected)
        return self._expected[1]

    # Running

    def replan(self, sequence: Sequence, force: bool = False, pause: int = 0) -> bool:
        """Renews a running sequence's demand from now on; kept only where it fits, or by force.

        pause: steps for which its slow reader may keep it from going on.
        """
        allocation, now = sequence.allocation, self.timeline.now
        assert allocation is not None
        rows = allocation.charged_rows, max(0, allocation.prompt - sequence.computed), allocation.rows_max, now
        demand = self.model.paused(*rows, steps=pause) if pause else self.model.running(*rows)
        self.timeline.remove(allocation.demand)
        conflict = self.timeline.last_conflict(demand)
        fits = conflict is None or force or self.rule == "learned"
        if fits:
            allocation.demand = demand
            self._oversubscribed_until = max(self._oversubscribed_until, -1 if conflict is None else conflict)
        self.timeline.add(allocation.demand)
        on_pace = sequence.generated and not sequence.held
        sequence.decodes_from = allocation.demand.ready + 1 if on_pace else NEVER
        return fits

    def ahead_of_demand(self, slot: int) -> bool:
        """Whether one more row would take the sequence in `slot` beyond its demand for this step."""
        allocation = self.ledger.allocations[slot]
        at, amounts = self.timeline.now - allocation.demand.begin, allocation.demand.amounts
        return bool(at < amounts.shape[1] and self.ledger.bytes_of[allocation.rows + 1] > amounts[BYTES, at])

    def stalled(self, growing: list[int]) -> set[int]:
        """Of the slots about to take a new page, oldest first: those that must wait, so that all can finish."""
        self._stalled = max(0.0, self._stalled - self.STALLED * len(self.ledger.allocations))
        if not self.oversubscribed:
            return set()
        refused = self.banker.refused(growing)
        self._stalled += len(refused)
        return refused

    def end(self, slot: int, keep: bool, by_itself: bool) -> None:
        """The sequence in `slot` has ended and returns slot, bytes and the rest of its demand; its rows may stay."""
        allocation = self.ledger.free(slot, keep)
        self._changes += 1
        self.output_lengths.ended(allocation.generated_rows, by_itself)
        self.timeline.remove(allocation.demand)
