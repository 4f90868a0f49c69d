"""Demand: what one sequence takes at each coming step. Timeline: their sum, and its limits. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.int64]  # [resource, steps]

BYTES, SLOTS, PROMPT = 0, 1, 2  # the resources: bytes held, slots held, prompt rows computed


@dataclass(slots=True, eq=False)
class Demand:
    """What a sequence takes at steps begin, begin + 1, ..., if it uses all of its max_tokens: `amounts` [3, steps].

    Step `ready` computes the last row of its prompt and yields its first token.
    """

    begin: int
    ready: int
    amounts: Amounts
    conflict: int = -1  # of a reservation: the step that last ruled out an earlier start

    @property
    def end(self) -> int:
        """The last step it takes part in."""
        return self.begin + self.amounts.shape[1] - 1

    def from_step(self, step: int) -> Amounts:
        """The part that is not yet past at `step`."""
        return self.amounts[:, max(0, step - self.begin) :]

    def bytes_at(self, step: int) -> int:
        at = step - self.begin
        return int(self.amounts[BYTES, at]) if 0 <= at < self.amounts.shape[1] else 0

    def prompt_rows_at(self, step: int) -> int:
        at = step - self.begin
        return int(self.amounts[PROMPT, at]) if 0 <= at < self.amounts.shape[1] else 0


class Timeline:
    """The sum of all demands at each step from `now` on, of running sequences and of reservations alike."""

    def __init__(self, pool_bytes: int, slots: int, prompt_rows: int) -> None:
        self.now = 0
        self.limits = np.array([[pool_bytes], [slots], [prompt_rows]], np.int64)
        self._sums = np.zeros((3, 4096), np.int64)
        self._base = 0  # the step of the first column

    def advance(self) -> None:
        """A step has passed. Half of the columns are recycled once they are past."""
        self.now += 1
        if self.now - self._base == self._sums.shape[1] // 2:
            past = self.now - self._base
            self._sums = np.concatenate([self._sums[:, past:], np.zeros((3, past), np.int64)], axis=1)
            self._base = self.now

    def totals(self, begin: int, steps: int) -> Amounts:
        """The sums at `steps` steps from `begin` on: a view [3, steps]."""
        at = begin - self._base
        while at + steps > self._sums.shape[1]:
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)], axis=1)
        return self._sums[:, at : at + steps]

    def add(self, demand: Demand) -> None:
        """Adds what is left of a demand; what is past stays as it was."""
        amounts = demand.from_step(self.now)
        self.totals(max(demand.begin, self.now), amounts.shape[1])[...] += amounts

    def remove(self, demand: Demand) -> None:
        amounts = demand.from_step(self.now)
        self.totals(max(demand.begin, self.now), amounts.shape[1])[...] -= amounts

    def last_conflict(self, demand: Demand) -> int | None:
        """The last step at which `demand` would exceed the bytes or slots that are left; None when it fits."""
        amounts = demand.amounts[:PROMPT]
        over = amounts + self.totals(demand.begin, amounts.shape[1])[:PROMPT] > self.limits[:PROMPT]  # [2, steps]
        if not over.any():
            return None
        return demand.begin + int(np.flatnonzero(over.any(axis=0))[-1])

    def is_full(self, step: int, bytes_: int, without: Demand | None) -> bool:
        """Whether `step` has no slot or not `bytes_` left, not counting the demand `without`."""
        column = self._sums[:, step - self._base]
        own = without.amounts[:, step - without.begin] if without and without.begin <= step <= without.end else (0, 0)
        no_slot = column[SLOTS] - own[SLOTS] >= self.limits[SLOTS, 0]
        return bool(no_slot or column[BYTES] - own[BYTES] + bytes_ > self.limits[BYTES, 0])

    def spread_prompt(self, rows: int, begin: int) -> list[int]:
        """Distributes `rows` prompt rows over the steps from `begin` on, as far as others leave room in each."""
        limit, steps = int(self.limits[PROMPT, 0]), 8
        spread: list[int] = []
        while rows:
            for taken in self.totals(begin, steps)[PROMPT][len(spread) :].tolist():
                part = min(rows, max(0, limit - taken))
                spread.append(part)
                rows -= part
                if not rows:
                    break
            steps *= 2
        return spread


class DemandModel:
    """Builds demands. curve[n]: bytes of n rows. With `flat`, a sequence is charged its maximum from the start."""

    def __init__(self, curve: Amounts, timeline: Timeline, flat: bool) -> None:
        self.curve = curve
        self.timeline = timeline
        self.flat = flat

    def running(self, held: int, prompt_rows: int, rows_max: int, begin: int) -> Demand:
        """`held` rows are charged at once, while `prompt_rows` of them are computed; then a row more at each step."""
        prompt = self.timeline.spread_prompt(prompt_rows, begin)
        prefill, steps = len(prompt), len(prompt) + rows_max - held
        amounts = np.zeros((3, steps), np.int64)
        amounts[BYTES, :prefill] = self.curve[held]
        amounts[BYTES, prefill:] = self.curve[held + 1 : rows_max + 1]
        if self.flat:
            amounts[BYTES] = self.curve[rows_max]
        amounts[SLOTS] = 1
        amounts[PROMPT, :prefill] = prompt
        return Demand(begin, begin + prefill - 1, amounts)

    def paused(self, held: int, prompt_rows: int, rows_max: int, begin: int, steps: int) -> Demand:
        """As `running` after a pause of `steps` steps; charged its maximum throughout, so it may resume any time."""
        resumed = self.running(held, prompt_rows, rows_max, begin)
        amounts = np.repeat(resumed.amounts[:, -1:], steps + resumed.amounts.shape[1], axis=1)
        amounts[BYTES] = self.curve[rows_max]
        return Demand(begin, begin + steps, amounts)

    def reserved(self, prompt: int, rows_max: int, begin: int) -> Demand:
        """A start at `begin` at the latest, charged at each step what it would hold had it started now.

        So it covers every start between now and `begin`: a request that starts early stays within its own reservation,
        and no early start can delay another's reservation.
        """
        demand = self.running(prompt, prompt, rows_max, begin)
        if not self.flat:
            grown = min(prompt + begin - self.timeline.now, rows_max)
            cover = self.curve[grown : min(grown + demand.amounts.shape[1], rows_max + 1)]
            demand.amounts[BYTES] = self.curve[rows_max]
            demand.amounts[BYTES, : len(cover)] = cover
        return demand
