"""Why a request waits, when it starts at the latest, and what it holds: questions to a scheduler between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Sequence

SLACK = 2.0  # steps may take this many times what they took lately before a reported time is exceeded


def seconds_until(scheduler: Scheduler, step: int) -> float:
    """What the steps before `step` take at the recent cost, with all the rows planned for them."""
    timeline = scheduler.timeline
    steps = max(0, step - timeline.now)
    rows = int(timeline.totals(timeline.now, steps)[1:].sum())  # a slot decodes one row or holds its prompt
    return steps * scheduler.cost.base + rows * scheduler.cost.slope


def latest_s(scheduler: Scheduler, step: int) -> float:
    """Seconds after which `step` begins at the latest. The step is certain, what steps take is not: hence SLACK."""
    return SLACK * seconds_until(scheduler, step)


def latest_start_s(scheduler: Scheduler, sequence: Sequence) -> float | None:
    """Seconds after which a waiting sequence starts at the latest; None when that is beyond the horizon."""
    return None if sequence.reservation is None else latest_s(scheduler, sequence.reservation.begin)


def next_start_s(scheduler: Scheduler) -> float:
    """Seconds after which the next waiting sequence starts at the latest; 0 when none waits."""
    return latest_s(scheduler, scheduler.queue.next_due) if scheduler.waiting else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request has no slot yet, and until when at the latest.

    reason: 'slot' or 'kv_bytes', of which running sequences hold too much; 'turn' when only reservations of earlier
    requests are in the way; 'reader' when its own reader is slow. latest_ms: None beyond the horizon.
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
    """One line on the state of a request, for a comment in its stream."""
    why = waiting(scheduler, request_id)
    if why:
        return why.comment
    for sequence in scheduler.sequences(request_id):
        if sequence.computed < len(sequence.request.prompt):
            return f"prefill rows={sequence.computed} of={len(sequence.request.prompt)}"
    return None


def waiting(scheduler: Scheduler, request_id: str) -> Waiting | None:
    """Why the first waiting choice of a request waits; None when none does."""
    sequence = next((one for one in scheduler.waiting if one.request.id == request_id), None)
    if sequence is None:
        return None
    latest = latest_start_s(scheduler, sequence)
    ids = list(dict.fromkeys(other.request.id for other in scheduler.waiting))
    ahead = ids[: ids.index(request_id)]
    held_by: list[dict[str, Any]] = []
    blocker = scheduler.admission.blocker(len(sequence.request.prompt), sequence.request.rows_max)
    if sequence.held:
        reason = "reader"
    elif blocker:
        reason, held_by = blocker[0], _holders(scheduler, blocker[1])
    else:
        reason, held_by = "turn", [{"request_id": id} for id in ahead[:3]]
    return Waiting(len(ahead) + 1, reason, None if latest is None else round(1000 * latest, 1), tuple(held_by))


def _holders(scheduler: Scheduler, step: int) -> list[dict[str, Any]]:
    """The three that hold most of the pool at that step, and until when at the latest."""
    holding = [
        (allocation.demand.bytes_at(step), slot, allocation.owner, allocation.demand.end)
        for slot, allocation in scheduler.ledger.allocations.items()
        if allocation.demand.begin <= step <= allocation.demand.end
    ]
    return [
        {
            "request_id": owner,
            "slot": slot,
            "bytes": bytes_,
            "until_ms": round(1000 * latest_s(scheduler, end + 1), 1),
        }
        for bytes_, slot, owner, end in sorted(holding, reverse=True)[:3]
    ]


def request_state(scheduler: Scheduler, request_id: str) -> dict[str, Any] | None:
    """Why a request waits, or what each of its choices holds; None when it is not there."""
    sequences = scheduler.sequences(request_id)
    if not sequences:
        return None
    request, layout = sequences[0].request, scheduler.ledger.layout
    state: dict[str, Any] = {
        "id": request.id,
        "state": "waiting",
        "prompt_tokens": len(request.prompt),
        "max_tokens": request.max_tokens,
        "needs": {"now": layout.committed(len(request.prompt)), "max": layout.committed(request.rows_max)},
        "choices": [_choice(scheduler, s) for s in sequences if s.slot is not None],
    }
    if state["choices"]:
        states = [choice["state"] for choice in state["choices"]]
        state["state"] = next(one for one in ("running", "held", "prefill") if one in states)
    why = waiting(scheduler, request_id)
    if why:
        state["waiting"] = {
            "position": why.position,
            "for": why.reason,
            "held_by": why.held_by,
            "latest_ms": why.latest_ms,
        }
    return state


def _choice(scheduler: Scheduler, sequence: Sequence) -> dict[str, Any]:
    allocation = sequence.allocation
    assert allocation is not None
    state = "held" if sequence.held else "prefill" if sequence.computed < allocation.prompt else "running"
    return {
        "index": sequence.index,
        "state": state,
        "slot": sequence.slot,
        "rows": allocation.rows,
        "rows_max": allocation.rows_max,
        "bytes": scheduler.ledger.bytes_of[allocation.rows],
        "cached_tokens": sequence.cached,
        "generated": sequence.generated,
        "latest_end_ms": round(1000 * latest_s(scheduler, allocation.demand.end + 1), 1),
    }
