"""RequestQueue: sequences that wait, in order, each with its reservation; and the rules of backfilling. Torch-free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.decision_log import DecisionLog
from tokenteller.server.engine.demand import Demand
from tokenteller.server.engine.sequence import Sequence

BYPASS_LIMIT = 4  # later sequences that may start before one that waits
LOOK_AHEAD = 16  # sequences that may be passed over at once, in search of one that fits


class RequestQueue:
    """First come first served within a priority, with backfilling: who delays no reservation may start early."""

    def __init__(self, admission: Admission, log: DecisionLog, bypass_limit: int = BYPASS_LIMIT) -> None:
        self.admission = admission
        self.log = log
        self.bypass_limit = bypass_limit
        self.waiting: list[Sequence] = []
        self.released = 0  # how often something came free; nobody is tried twice for the same
        self.next_due = 0  # the first step with a reserved start
        self._tried = 0  # `released` when the queue was last gone through

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)
        self._reserve(self.waiting.index(sequence))
        self._tried = -1
        self.log.reserved(sequence)

    def remove(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if sequence.reservation:
            self.admission.timeline.remove(sequence.reservation)

    def admit(self, start: Callable[[Sequence, Demand], None]) -> None:
        """Starts all that are due, and those that can start early, in order.

        One that has been bypassed `bypass_limit` times closes the queue behind it to early starts.
        """
        now = self.admission.timeline.now
        if not self.waiting or (self._tried == self.released and now < self.next_due):
            return
        self._tried = self.released
        passed: list[Sequence] = []
        closed = False
        for sequence in self.waiting.copy():
            due = sequence.reservation is not None and sequence.reservation.begin <= now
            if (closed and not due) or sequence.held:
                continue
            if (due or sequence.tried != self.released) and self._start(sequence, start):
                self.log.started(sequence, due, len(passed))
                if not due:
                    for other in passed:
                        other.bypassed += 1
                        closed |= other.bypassed >= self.bypass_limit
                continue
            sequence.tried = self.released
            if due:
                self._postpone(sequence)
            passed.append(sequence)
            closed |= sequence.bypassed >= self.bypass_limit or len(passed) >= LOOK_AHEAD
        self._reserve_missing()

    def _start(self, sequence: Sequence, start: Callable[[Sequence, Demand], None]) -> bool:
        request = sequence.request
        demand = self.admission.start(len(request.prompt), request.rows_max, sequence.reservation)
        if demand is None:
            return False
        self.waiting.remove(sequence)
        sequence.reservation = None
        start(sequence, demand)
        return True

    def _reserve(self, at: int) -> None:
        """Reserves a start for the sequence at place `at`, not before that of the one ahead of it."""
        sequence, earliest = self.waiting[at], self.admission.timeline.now
        if at:
            ahead = self.waiting[at - 1].reservation
            if ahead is None:
                return
            earliest = max(earliest, ahead.begin)
        request = sequence.request
        sequence.reservation = self.admission.reserve(len(request.prompt), request.rows_max, earliest)
        if sequence.reservation:
            self.next_due = min(self.next_due, sequence.reservation.begin)

    def _reserve_missing(self) -> None:
        """Reserves starts that were beyond the horizon when their sequences arrived."""
        for at, sequence in enumerate(self.waiting):
            if sequence.reservation is None:
                self._reserve(at)
                if sequence.reservation is None:
                    break
        horizon = self.admission.timeline.now + self.admission.HORIZON
        self.next_due = min((s.reservation.begin for s in self.waiting if s.reservation), default=horizon)

    def _postpone(self, sequence: Sequence) -> None:
        """Moves a reservation that could not be kept, because a running sequence fell behind its demand."""
        self.log.counts.postponed += 1
        admission, request = self.admission, sequence.request
        if sequence.reservation:
            admission.timeline.remove(sequence.reservation)
        sequence.reservation = admission.reserve(len(request.prompt), request.rows_max, admission.timeline.now + 1)
