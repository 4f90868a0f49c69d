"""The banker's algorithm (Dijkstra 1965): which growth leaves an order in which all can finish. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from tokenteller.server.engine.ledger import KVLedger


def is_safe(free: int, claims: Iterable[tuple[int, int]]) -> bool:
    """Whether all can finish one after another, each from what is free and what those before it returned.

    claims: (bytes still needed, bytes held) of each. The smallest need goes first; if that order fails, every one does.
    """
    if free < 0:
        return False
    ordered = sorted(claims)
    for need, held in ordered:
        if free >= ordered[-1][0]:
            return True
        if need > free:
            return False
        free += held
    return True


class Banker:
    """Judges the state of a ledger, after growth and admissions that are only considered."""

    def __init__(self, ledger: KVLedger) -> None:
        self.ledger = ledger

    def safe(self, growing: Iterable[int] = (), newcomer: tuple[int, int] = (0, 0)) -> bool:
        """Whether the state is safe with a row more in each slot of `growing`, and a newcomer (prompt, rows_max)."""
        bytes_of, grown = self.ledger.bytes_of, set(growing)
        prompt, rows_max = newcomer
        claims = [(bytes_of[rows_max] - bytes_of[prompt], bytes_of[prompt])]
        for slot, allocation in self.ledger.allocations.items():
            held = bytes_of[allocation.charged_rows + (slot in grown)]
            claims.append((bytes_of[allocation.rows_max] - held, held))
        return is_safe(self.ledger.budget_bytes - sum([held for _, held in claims]), claims)

    def refused(self, growing: Seq[int]) -> set[int]:
        """Of slots about to grow by a row, oldest first, those whose growth would leave no safe order."""
        if self.safe(growing):
            return set()
        granted: list[int] = []
        for slot in growing:
            if self.safe([*granted, slot]):
                granted.append(slot)
        return set(growing) - set(granted)
