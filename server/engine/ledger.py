"""KVLedger: who holds which slot and how many bytes now. What is to come is on the timeline (demand.py). Torch-free."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.demand import Demand


@dataclass(slots=True)
class Allocation:
    """What a running sequence holds: its prompt is charged in full at once, then each row as it comes.

    The bytes of `rows` rows would hold `capacity` rows: growing up to there costs nothing.
    """

    owner: str
    prompt: int
    rows_max: int
    demand: Demand
    rows: int = 0
    capacity: int = 0

    @property
    def charged_rows(self) -> int:
        return max(self.rows, self.prompt)

    @property
    def generated_rows(self) -> int:
        return max(0, self.rows - self.prompt)


class KVLedger:
    """Slots and bytes. A slot is free, allocated to a running sequence, or cached: kept for its prefix.

    Cached slots are evicted, least recently used first, as soon as a slot or their bytes are wanted.
    """

    def __init__(self, layout: KVLayout, slots: int, budget_bytes: int) -> None:
        self.layout = layout
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.allocations: dict[int, Allocation] = {}
        self.cached: dict[int, int] = {}  # slot -> rows, least recently used first
        self.bytes_of = [layout.committed(rows) for rows in range(layout.max_context + 1)]
        self.curve = np.array(self.bytes_of, np.int64)
        self._capacity = (np.searchsorted(self.curve, self.curve, "right") - 1).tolist()  # rows for the same bytes
        self._free = list(range(slots))  # a heap: the lowest free slot goes first
        self._allocated = self._cached = self._committed = 0

    @property
    def free_slots(self) -> int:
        """Slots that a new sequence can have: free ones, and cached ones."""
        return len(self._free) + len(self.cached)

    @property
    def committed_bytes(self) -> int:
        """Bytes of all rows in the pool, running and cached: what the pool's mapping really takes."""
        return self._committed + self._cached

    @property
    def cached_bytes(self) -> int:
        return self._cached

    @property
    def allocated_bytes(self) -> int:
        """Bytes charged to running sequences, prompts in full."""
        return self._allocated

    # Slots

    def allocate(
        self, owner: str, prompt: int, rows_max: int, demand: Demand, slot: int | None = None
    ) -> tuple[int, list[int]]:
        """Allocates a cached slot with its rows, or the lowest free one. Returns it and the slots evicted for it."""
        self._allocated += self.bytes_of[prompt]
        if slot is None:
            evicted = self.make_room(slots=1)
            slot = heapq.heappop(self._free)
        else:
            self._cached -= self.bytes_of[self.cached.pop(slot)]
            evicted = self.make_room()
        self.allocations[slot] = Allocation(owner, prompt, rows_max, demand)
        return slot, evicted

    def free(self, slot: int, keep: bool) -> Allocation:
        """Ends an allocation; with `keep` its rows stay cached."""
        allocation = self.allocations.pop(slot)
        self._allocated -= self.bytes_of[allocation.charged_rows]
        self._committed -= self.bytes_of[allocation.rows]
        if keep and allocation.rows:
            self.cached[slot] = allocation.rows
            self._cached += self.bytes_of[allocation.rows]
        else:
            heapq.heappush(self._free, slot)
        return allocation

    def make_room(self, growth: int = 0, slots: int = 0) -> list[int]:
        """Evicts cached slots until `slots` slots and `growth` bytes are free. Returns the slots evicted."""
        evicted = []
        while self.cached and (len(self._free) < slots or self._allocated + self._cached + growth > self.budget_bytes):
            slot, rows = next(iter(self.cached.items()))
            del self.cached[slot]
            self._cached -= self.bytes_of[rows]
            heapq.heappush(self._free, slot)
            evicted.append(slot)
        return evicted

    def touch(self, slot: int) -> None:
        """A cached slot was used: it is now the last to be evicted."""
        self.cached[slot] = self.cached.pop(slot)

    def can_keep(self, slot: int, prompt: int) -> bool:
        """Whether a cached slot can stay while another is allocated for a prompt of `prompt` rows."""
        together = self._allocated + self.bytes_of[prompt] + self.bytes_of[self.cached[slot]]
        return self.free_slots > 1 and together <= self.budget_bytes

    # Rows

    def grow(self, slot: int, rows: int) -> None:
        """The sequence in `slot` now has `rows` rows in the pool."""
        allocation = self.allocations[slot]
        before, bytes_of = allocation.rows, self.bytes_of
        assert before <= rows <= allocation.rows_max, (slot, allocation, rows)
        allocation.rows = rows
        allocation.capacity = min(self._capacity[rows], allocation.rows_max)
        self._committed += bytes_of[rows] - bytes_of[before]
        if rows > allocation.prompt:
            self._allocated += bytes_of[rows] - bytes_of[max(before, allocation.prompt)]

    def next_row_bytes(self, slot: int) -> int:
        """What one more row costs a sequence that decodes."""
        rows = self.allocations[slot].rows
        return self.bytes_of[rows + 1] - self.bytes_of[rows]

    def rows_after_next(self, slot: int) -> int:
        """How many rows may follow the next one at no further cost."""
        allocation = self.allocations[slot]
        after = allocation.rows + 1
        return min(self._capacity[after], allocation.rows_max) - after

    def check(self) -> None:
        """Proves conservation: every slot in one place, every sum equal to its parts, nothing beyond the pool."""
        bytes_of, allocations = self.bytes_of, self.allocations.values()
        assert sorted([*self._free, *self.allocations, *self.cached]) == list(range(self.slots))
        assert all(0 <= a.rows <= a.capacity <= a.rows_max and a.prompt <= a.rows_max for a in allocations)
        assert all(bytes_of[a.capacity] == bytes_of[a.rows] for a in allocations)
        assert self._committed == sum(bytes_of[a.rows] for a in allocations)
        assert self._allocated == sum(bytes_of[a.charged_rows] for a in allocations)
        assert self._cached == sum(bytes_of[rows] for rows in self.cached.values())
        assert self._committed <= self._allocated
        assert self._allocated + self._cached <= self.budget_bytes
