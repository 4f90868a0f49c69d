"""Why a request waits, and what there is to tell of it: questions to a scheduler between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenteller.server.engine.ledger import BYTES
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request has no slot yet, and until when at the latest.

    reason: 'slot' or 'kv_bytes', of which those that run have too much; 'turn' when only those before it keep it out;
    'reader' when its own reader is slow. latest_ms: None when the time is too far to tell.
    """

    position: int
    reason: str
    latest_ms: float | None
    held_by: tuple[dict[str, Any], ...] = ()

    @property
    def comment(self) -> str:
        """position=2 for=kv_bytes latest_ms=840"""
        latest = "unknown" if self.latest_ms is None else f"{self.latest_ms:.0f}"
        return f"waiting position={self.position} for={self.reason} latest_ms={latest}"


def progress(scheduler: Scheduler, request_id: str) -> str | None:
    """One line on how a request stands, for a comment in its stream."""
    why = waiting(scheduler, request_id)
    if why:
        return why.comment
    for sequence in scheduler.sequences(request_id):
        if sequence.computed < len(sequence.request.prompt):
            return f"prefill rows={sequence.computed} of={len(sequence.request.prompt)}"
    return None


def waiting(scheduler: Scheduler, request_id: str) -> Waiting | None:
    """Why the first choice of a request waits; None when it does not."""
    sequence = next((one for one in scheduler.waiting if one.request.id == request_id), None)
    if sequence is None:
        return None
    latest = scheduler.latest_s(sequence)
    reason, step = _binds(scheduler, sequence)
    ids = list(dict.fromkeys(other.request.id for other in scheduler.waiting))
    ahead = ids[: ids.index(request_id)]
    if reason == "turn":
        held_by = tuple({"request_id": id} for id in ahead[:3])
    else:
        held_by = tuple(_holders(scheduler, step)) if step is not None else ()
    return Waiting(len(ahead) + 1, reason, None if latest is None else round(1000 * latest, 1), held_by)


def _binds(scheduler: Scheduler, sequence: Sequence) -> tuple[str, int | None]:
    request = sequence.request
    if request.id in scheduler.held:
        return "reader", None
    clash = scheduler.ledger.clash_with_running(len(request.prompt), request.rows_max)
    return ("turn", None) if clash is None else clash


def _holders(scheduler: Scheduler, step: int) -> list[dict[str, Any]]:
    """Who takes most of the pool at that step, and until when at the latest."""
    taking = []
    for slot, account in scheduler.ledger.accounts.items():
        plan = account.plan
        if plan.begin <= step <= plan.end:
            taking.append((int(plan.take[BYTES, step - plan.begin]), slot, account.owner, plan.end))
    taking.sort(reverse=True)
    return [
        {
            "request_id": owner,
            "slot": slot,
            "bytes": bytes_,
            "until_ms": round(1000 * scheduler.within_s(end + 1), 1),
        }
        for bytes_, slot, owner, end in taking[:3]
    ]


def request_state(scheduler: Scheduler, request_id: str) -> dict[str, Any] | None:
    """All there is to tell of a request: why it waits, or what each choice holds; None when it is not there."""
    sequences = scheduler.sequences(request_id)
    if not sequences:
        return None
    request = sequences[0].request
    layout = scheduler.ledger.layout
    told: dict[str, Any] = {
        "id": request.id,
        "state": "waiting",
        "prompt_tokens": len(request.prompt),
        "max_tokens": request.max_tokens,
        "needs": {"now": layout.committed(len(request.prompt)), "max": layout.committed(request.rows_max)},
        "choices": [_choice(scheduler, s) for s in sequences if s.slot is not None],
    }
    if told["choices"]:
        states = [choice["state"] for choice in told["choices"]]
        told["state"] = next(state for state in ("running", "held", "prefill") if state in states)
    why = waiting(scheduler, request_id)
    if why:
        told["waiting"] = {
            "position": why.position,
            "for": why.reason,
            "held_by": why.held_by,
            "latest_ms": why.latest_ms,
        }
    return told


def _choice(scheduler: Scheduler, sequence: Sequence) -> dict[str, Any]:
    assert sequence.slot is not None
    account = scheduler.ledger.accounts[sequence.slot]
    prompt = len(sequence.request.prompt)
    state = "held" if sequence.held else "prefill" if sequence.computed < prompt else "running"
    return {
        "index": sequence.index,
        "state": state,
        "slot": sequence.slot,
        "rows": account.rows,
        "rows_max": account.rows_max,
        "bytes": scheduler.ledger.layout.committed(account.rows),
        "cached_tokens": sequence.cached,
        "generated": sequence.generated,
        "latest_end_ms": round(1000 * scheduler.within_s(account.plan.end + 1), 1),
    }
