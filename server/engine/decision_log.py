"""DecisionLog: each decision of the scheduler as it is made, with its numbers (`serve --explain`). Torch-free."""

from __future__ import annotations

import logging
from typing import Any

from tokenteller.server.engine.demand import BYTES, Timeline
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.sequence import Sequence

log = logging.getLogger("tokenteller.decisions")


class DecisionLog:
    def __init__(self, ledger: KVLedger, timeline: Timeline) -> None:
        self.ledger = ledger
        self.timeline = timeline

    def reserved(self, sequence: Sequence) -> None:
        """It waits; one that will start with the next step is not worth a line."""
        reservation, now = sequence.reservation, self.timeline.now
        if reservation is None:
            self._log("waits", sequence, "no step within the horizon has room for it")
        elif reservation.begin > now:
            ahead = reservation.begin - now
            why = f"the first step from which on D(t) with it stays within the pool is +{ahead}"
            self._log("waits", sequence, why, latest_step=ahead)

    def started(self, sequence: Sequence, due: bool, passed: int) -> None:
        assert sequence.allocation is not None
        demand = sequence.allocation.demand
        total = self.timeline.totals(demand.begin, demand.amounts.shape[1])[BYTES]
        at = int(total.argmax())
        how = "its reservation is due" if due else f"ahead of {passed} earlier ones" if passed else "it fits"
        why = (
            f"{how}: max D(t) = {int(total[at]):,} at step +{at} <= pool {self.ledger.budget_bytes:,}; "
            f"holds {demand.amounts[BYTES, 0]:,} bytes now, {demand.amounts[BYTES, -1]:,} at most"
        )
        self._log("starts", sequence, why, slot=sequence.slot, cached_tokens=sequence.cached)

    def reused(self, sequence: Sequence, rows: int, source: int) -> None:
        copied = source != sequence.slot
        why = f"{rows} rows copied from slot {source}" if copied else f"slot {source} taken over with {rows} rows"
        self._log("reuses", sequence, why, slot=sequence.slot)

    def stalled(self, sequence: Sequence, why: str) -> None:
        self._log("stalls", sequence, why, slot=sequence.slot)

    def ended(self, sequence: Sequence, keep: bool) -> None:
        assert sequence.allocation is not None
        bytes_ = self.ledger.bytes_of[sequence.allocation.charged_rows]
        why = f"releases {bytes_:,} bytes" + ("; its rows stay cached until they are wanted" if keep else "")
        self._log("ends", sequence, why, slot=sequence.slot)

    def evicted(self, slot: int, rows: int) -> None:
        log.info("cached slot evicted", extra={"fields": {"slot": slot, "rows": rows}})

    def _log(self, decision: str, sequence: Sequence, why: str, **fields: Any) -> None:
        named = {"id": sequence.request.id, "index": sequence.index, "step": self.timeline.now, "why": why}
        log.info(decision, extra={"fields": named | fields})
