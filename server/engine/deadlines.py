"""Deadlines: which sequences have run out of time. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from tokenteller.server.engine.sequence import Sequence

PER_REQUEST = 32  # entries per live request beyond which those of ended ones are dropped


class Deadlines:
    """A heap of `deadline` and `start_by` of all live sequences; entries of ended ones are dropped in time.

    live: the sequences of each request that have not ended, kept by the scheduler.
    """

    def __init__(self, live: dict[str, list[Sequence]]) -> None:
        self._live = live
        self._heap: list[tuple[float, int, Sequence, bool]] = []  # True: only until the request has a slot
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """When the next one may expire, in seconds of the engine's clock."""
        return self._heap[0][0] if self._heap else None

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        for time, until_started in ((request.deadline, False), (request.start_by, True)):
            if time is not None:
                heapq.heappush(self._heap, (time, next(self._serial), sequence, until_started))

    def expired(self, now: float) -> Iterator[Sequence]:
        """Each sequence that has run out of time; the caller ends it before it asks for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, sequence, until_started = heapq.heappop(self._heap)
            live = self._live.get(sequence.request.id, ())
            if sequence in live and not (until_started and any(s.slot is not None for s in live)):
                yield sequence

    def prune(self) -> None:
        """Drops entries of ended sequences once they are many."""
        if len(self._heap) > PER_REQUEST * len(self._live):
            self._heap = [entry for entry in self._heap if entry[2] in self._live.get(entry[2].request.id, ())]
            heapq.heapify(self._heap)
