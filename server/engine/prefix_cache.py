"""PrefixCache: slots change hands here, with the rows in them. Torch-free.

The rows of an ended sequence stay in its slot until slot or bytes are wanted. A new sequence with the same prefix takes
the slot over or copies the rows. From a running sequence it copies them as soon as they are computed.
"""

from __future__ import annotations

from tokenteller.server.engine.decision_log import DecisionLog
from tokenteller.server.engine.demand import Demand
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.sequence import Copy, Release, Sequence

MIN_SHARED = 16  # rows of a common prefix below which computing them is as cheap as copying


class PrefixCache:
    """Gives starting sequences their slots, reuses prefixes, and collects the moves this takes in the pool."""

    def __init__(self, ledger: KVLedger, running: list[Sequence], log: DecisionLog) -> None:
        self.ledger = ledger
        self.running = running
        self.log = log
        self.ended: dict[int, Sequence] = {}  # by slot; the ledger has the order of their use
        self._moves: list[Release | Copy] = []

    def take_moves(self) -> tuple[Release | Copy, ...]:
        """What to do in the pool before anything is computed; each is handed out once."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def allocate(self, sequence: Sequence, demand: Demand) -> None:
        """Gives a sequence its slot, and what is already computed of its prompt."""
        request, ledger = sequence.request, self.ledger
        prompt, adopted = len(request.prompt), None
        source, shared = self._longest_prefix(sequence)
        if source and source.slot in ledger.cached:
            if shared == source.computed or not ledger.can_keep(source.slot, prompt):
                adopted = source.slot
            else:
                ledger.touch(source.slot)
        sequence.slot, evicted = ledger.allocate(request.id, prompt, request.rows_max, demand, adopted)
        sequence.allocation = ledger.allocations[sequence.slot]
        self._forget(evicted)
        if source and adopted is not None:
            del self.ended[adopted]
            source.slot = None
            if shared < source.computed:
                self._moves.append(Release(adopted, keep=shared))
            self._reuse(sequence, shared, adopted)
        elif source:
            sequence.source, sequence.shared = source, shared
            self.copy_if_computed(sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes over the slot of a sequence whose allocation has ended, with its rows if the ledger keeps them."""
        assert sequence.slot is not None
        sequence.allocation = None
        if sequence.slot in self.ledger.cached:
            self.ended[sequence.slot] = sequence
        else:
            self._moves.append(Release(sequence.slot))
            sequence.slot = None

    def evict(self, growth: int) -> None:
        """Makes room for running sequences to grow by `growth` bytes."""
        self._forget(self.ledger.make_room(growth))

    def copy_if_computed(self, sequence: Sequence) -> bool:
        """Copies shared rows once the source has computed them all, or what there is of them when it stops."""
        source = sequence.source
        assert source is not None and sequence.slot is not None
        if source.slot in self.ledger.allocations and not source.held and source.computed < sequence.shared:
            return False
        sequence.source = None
        rows = min(sequence.shared, source.computed)
        if source.slot is None or rows <= sequence.computed or not self.ledger.layout.holds(source.computed, rows):
            return False
        self._moves.append(Copy(source.slot, sequence.slot, rows))
        self._reuse(sequence, rows, source.slot)
        return True

    def check(self) -> None:
        assert {slot: sequence.computed for slot, sequence in self.ended.items()} == self.ledger.cached

    def _longest_prefix(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The sequence that has, or is computing, the longest prefix of the prompt, and its rows.

        The last row of a prompt is always computed: the first token is sampled from it.
        """
        best, most = None, MIN_SHARED - 1
        if sequence.request.cache_prefix:
            salt, tokens, holds = sequence.request.cache_salt, sequence.tokens, self.ledger.layout.holds
            for other in (*self.running, *self.ended.values()):
                if other.request.cache_prefix and other.request.cache_salt == salt:
                    known = other.computed if other.slot in self.ended else len(other.request.prompt)
                    known = max(known, other.computed)
                    rows = common_prefix(tokens, other.tokens, min(len(tokens) - 1, known))
                    if rows > most and holds(max(rows, other.computed), rows):
                        best, most = other, rows
        return best, most if best else 0

    def _reuse(self, sequence: Sequence, rows: int, source: int) -> None:
        assert sequence.slot is not None
        sequence.cached = rows - sequence.computed
        sequence.computed = rows
        self.ledger.grow(sequence.slot, rows)
        self.log.reused(sequence, rows, source)

    def _forget(self, slots: list[int]) -> None:
        """The ledger has evicted these slots."""
        for slot in slots:
            sequence = self.ended.pop(slot)
            sequence.slot = None
            self._moves.append(Release(slot))
            self.log.evicted(slot, sequence.computed)


def common_prefix(one: list[int], other: list[int], limit: int) -> int:
    """How many tokens two lists share at their beginning, at most `limit`. Bisects, since slices compare in C."""
    low, high = 0, min(len(one), len(other), limit)
    if one[:16] != other[:16]:
        high = min(high, 16)
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
