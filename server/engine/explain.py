"""Every decision of the scheduler as it is made, with its formula filled in (`serve --explain`)."""

from __future__ import annotations

import logging
from typing import Any

from tokenteller.server.engine.ledger import BYTES, KVLedger
from tokenteller.server.engine.sequence import Sequence

log = logging.getLogger("tokenteller.decisions")


class Decisions:
    """Logs each decision with its formula filled in."""

    def __init__(self, ledger: KVLedger) -> None:
        self.ledger = ledger

    def booked(self, sequence: Sequence) -> None:
        """It waits, or will start with the next step."""
        plan, table = sequence.plan, self.ledger.timetable
        if plan is None:
            self._tell("waits", sequence, "no step within the horizon has room for it")
        elif plan.begin > table.now:
            told = f"D(t) with it stays within the pool from step +{plan.begin - table.now} on, not before"
            self._tell("waits", sequence, told, latest_step=plan.begin - table.now)

    def started(self, sequence: Sequence, due: bool, behind: int) -> None:
        assert sequence.slot is not None
        plan, table = self.ledger.accounts[sequence.slot].plan, self.ledger.timetable
        demand = table.ahead(plan.begin, plan.take.shape[1])[BYTES]
        at = int(demand.argmax())
        why = "its time has come" if due else f"before its time, past {behind}" if behind else "it fits"
        told = (
            f"{why}: max D(t) = {int(demand[at]):,} at step +{at} <= pool {self.ledger.budget_bytes:,}; "
            f"holds {int(plan.take[BYTES, 0]):,} bytes now, {int(plan.take[BYTES, -1]):,} at most"
        )
        self._tell("starts", sequence, told, slot=sequence.slot, cached_tokens=sequence.cached)

    def reused(self, sequence: Sequence, rows: int, source: int, copied: bool) -> None:
        how = f"{rows} rows copied from slot {source}" if copied else f"slot {source} taken over with {rows} rows"
        self._tell("reuses", sequence, how, slot=sequence.slot)

    def sits_out(self, sequence: Sequence, why: str) -> None:
        self._tell("sits out", sequence, why, slot=sequence.slot)

    def ended(self, sequence: Sequence, bytes_: int, kept: bool) -> None:
        told = f"gives back {bytes_:,} bytes" + ("; its rows stay until they are wanted" if kept else "")
        self._tell("ends", sequence, told, slot=sequence.slot)

    def given_up(self, slot: int, rows: int) -> None:
        log.info("resident slot given up", extra={"fields": {"slot": slot, "rows": rows}})

    def _tell(self, decision: str, sequence: Sequence, told: str, **fields: Any) -> None:
        step = self.ledger.timetable.now
        named = {"id": sequence.request.id, "index": sequence.index, "step": step, "told": told}
        log.info(decision, extra={"fields": named | fields})
