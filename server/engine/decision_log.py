"""DecisionLog: counts each decision of the scheduler, and with --explain logs it with its numbers. Torch-free."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.demand import BYTES
from tokenteller.server.engine.sequence import Sequence

log = logging.getLogger("tokenteller.decisions")


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    bypasses: int = 0  # starts ahead of an earlier request
    postponed: int = 0  # starts that could not be made when they were due
    stalled_steps: int = 0  # steps that a sequence sat out, for a safe order or another's reservation
    prefix_rows: int = 0  # rows that did not have to be computed
    drafted: int = 0
    accepted: int = 0  # draft tokens that were right


class DecisionLog:
    def __init__(self, admission: Admission, explain: bool) -> None:
        self.admission = admission
        self.explain = explain
        self.counts = Counts()

    def reserved(self, sequence: Sequence) -> None:
        """It waits; one that will start with the next step is not worth a line."""
        reservation, now = sequence.reservation, self.admission.timeline.now
        if reservation is None:
            self._log("waits", sequence, "no step within the horizon has room for it")
        elif reservation.begin > now:
            ahead = reservation.begin - now
            why = f"the first step from which on D(t) with it stays within the pool is +{ahead}"
            self._log("waits", sequence, why, latest_step=ahead)

    def started(self, sequence: Sequence, due: bool, passed: int) -> None:
        self.counts.bypasses += bool(passed and not due)
        if not self.explain:
            return
        assert sequence.allocation is not None
        demand = sequence.allocation.demand
        total = self.admission.timeline.totals(demand.begin, demand.amounts.shape[1])[BYTES]
        at = int(total.argmax())
        how = "its reservation is due" if due else f"ahead of {passed} earlier ones" if passed else "it fits"
        why = (
            f"{how}: max D(t) = {int(total[at]):,} at step +{at} <= pool {self.admission.ledger.budget_bytes:,}; "
            f"holds {demand.amounts[BYTES, 0]:,} bytes now, {demand.amounts[BYTES, -1]:,} at most"
        )
        self._log("starts", sequence, why, cached_tokens=sequence.cached)

    def reused(self, sequence: Sequence, rows: int, source: int) -> None:
        self.counts.prefix_rows += sequence.cached
        copied = source != sequence.slot
        why = f"{rows} rows copied from slot {source}" if copied else f"slot {source} taken over with {rows} rows"
        self._log("reuses", sequence, why)

    def stalled(self, sequence: Sequence, why: str) -> None:
        self.counts.stalled_steps += 1
        self._log("stalls", sequence, why)

    def ended(self, sequence: Sequence, keep: bool) -> None:
        assert sequence.allocation is not None
        bytes_ = self.admission.ledger.bytes_of[sequence.allocation.charged_rows]
        why = f"releases {bytes_:,} bytes" + ("; its rows stay cached until they are wanted" if keep else "")
        self._log("ends", sequence, why)

    def evicted(self, slot: int, rows: int) -> None:
        if self.explain:
            log.info("cached slot evicted", extra={"fields": {"slot": slot, "rows": rows}})

    def _log(self, decision: str, sequence: Sequence, why: str, **fields: Any) -> None:
        if self.explain:
            named = {"id": sequence.request.id, "index": sequence.index, "step": self.admission.timeline.now}
            place = {} if sequence.slot is None else {"slot": sequence.slot}
            log.info(decision, extra={"fields": named | {"why": why} | place | fields})
