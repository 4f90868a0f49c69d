"""KVLedger: who holds which slot and how many bytes. It lends only what the pool can pay. Torch-free."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from model.kv_memory import KVLayout


@dataclass(slots=True)
class Account:
    """One slot's holder: rows it has now, rows it may ever have."""

    owner: str
    rows: int
    rows_max: int


class KVLedger:
    """Admission by plain reservation: a slot is lent when the committed bytes of all the rows_max are covered."""

    def __init__(self, layout: KVLayout, slots: int, budget_bytes: int) -> None:
        self.layout = layout
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.accounts: dict[int, Account] = {}
        self._free = list(range(slots))  # a heap: the lowest free slot is lent first
        self._promised = 0
        self._committed = 0

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def committed_bytes(self) -> int:
        """Bytes of the rows held now: what the pool's mapping really takes."""
        return self._committed

    @property
    def peak_demand_bytes(self) -> int:
        """Bytes that the present holders can ever come to hold together."""
        return self._promised

    def binds(self, rows_max: int) -> str | None:
        """What keeps a sequence of rows_max rows out right now: 'slot', 'kv_bytes' or None."""
        if not self._free:
            return "slot"
        if self._promised + self.layout.committed(rows_max) > self.budget_bytes:
            return "kv_bytes"
        return None

    def admit(self, owner: str, rows_max: int) -> int | None:
        """Lends a slot for at most rows_max rows, or None when slots or bytes do not cover it."""
        if self.binds(rows_max):
            return None
        slot = heapq.heappop(self._free)
        self.accounts[slot] = Account(owner, 0, rows_max)
        self._promised += self.layout.committed(rows_max)
        return slot

    def grow(self, slot: int, rows: int) -> None:
        """The holder of `slot` now has `rows` rows."""
        account = self.accounts[slot]
        assert account.rows <= rows <= account.rows_max, (slot, account, rows)
        self._committed += self.layout.committed(rows) - self.layout.committed(account.rows)
        account.rows = rows

    def release(self, slot: int) -> None:
        """Takes back the slot, its rows and its promise."""
        account = self.accounts.pop(slot)
        self._committed -= self.layout.committed(account.rows)
        self._promised -= self.layout.committed(account.rows_max)
        heapq.heappush(self._free, slot)

    def check(self) -> None:
        """Proves conservation: every slot free or held, held within promised, promised within the budget."""
        assert sorted([*self._free, *self.accounts]) == list(range(self.slots))
        assert self._committed == sum(self.layout.committed(a.rows) for a in self.accounts.values())
        assert self._promised == sum(self.layout.committed(a.rows_max) for a in self.accounts.values())
        assert all(a.rows <= a.rows_max for a in self.accounts.values())
        assert self._committed <= self._promised <= self.budget_bytes
