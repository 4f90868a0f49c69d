"""Health, readiness, the plan and the slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from tokenteller.server import logs
from tokenteller.server.api import sse
from tokenteller.server.api.body import answers
from tokenteller.server.api.pool import Picture
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.engine.runner import Runner
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.waiting import request_state
from tokenteller.server.errors import NotFound, Unavailable
from tokenteller.server.metrics import WAITING_FOR, Levels

router = APIRouter()
T = TypeVar("T")


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Whether the process lives and its engine is neither dead nor stuck. Never waits for the engine."""
    service = service_of(request)
    sick = service.streams.sick()
    if sick is None:
        return JSONResponse({"status": "ok", "model": service.model_name})
    return JSONResponse({"status": "stuck" if service.engine.alive else "dead", "reason": sick}, status_code=503)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether a request sent now would be taken."""
    service = service_of(request)
    service.streams.check_open()
    return JSONResponse({"status": "ready", "model": service.model_name})


@router.get("/plan")
async def plan(request: Request) -> JSONResponse:
    """What the KV memory formula allows here."""
    return JSONResponse(service_of(request).plan.to_json())


@router.get("/slots")
async def slots(request: Request) -> JSONResponse:
    """Every slot and the pool's bytes: by the formula, by the ledger, and by the kernel."""
    return JSONResponse(await ask(service_of(request), _slots))


def _slots(scheduler: Scheduler, runner: Runner) -> dict[str, Any]:
    ledger, layout = scheduler.ledger, scheduler.ledger.layout
    rows = []
    for slot in range(ledger.slots):
        row = {"slot": slot, "state": "free", "request_id": None, "rows": 0, "rows_max": 0, "bytes": 0}
        if allocation := ledger.allocations.get(slot):
            row |= {"state": "running", "request_id": allocation.owner, "rows": allocation.rows}
            row |= {"rows_max": allocation.rows_max, "bytes": layout.committed(allocation.rows)}
        elif cached := ledger.cached.get(slot):
            row |= {"state": "resident", "rows": cached, "rows_max": cached, "bytes": layout.committed(cached)}
        rows.append(row)
    pool = {
        "budget_bytes": ledger.budget_bytes,
        "committed_bytes": ledger.committed_bytes,
        "lent_bytes": ledger.allocated_bytes,
        "resident_bytes": runner.pool.resident_bytes(),
        "bytes_per_token": layout.bytes_per_token,
        "peak_demand_bytes": scheduler.admission.peak_demand_bytes,
    }
    return {"pool": pool, "slots": rows, "waiting": len(scheduler.waiting)}


@router.get("/pool", openapi_extra=answers("text/event-stream"))
async def pool(request: Request) -> Response:
    """The live picture of the pool, as SSE, five times a second."""
    picture: Picture = request.app.state.picture
    if request.scope.get("head"):
        return Response(media_type="text/event-stream", headers=sse.HEADERS)
    leave = picture.enter()
    return sse.EventStreamResponse(picture.frames(), leave, {})


@router.get("/requests/{id}")
async def one_request(request: Request, id: str) -> JSONResponse:
    """How a request stands: why it waits and until when at the latest, or what it holds."""
    service = service_of(request)
    stream = service.streams.find(id)
    told = None if stream is None else await ask(service, lambda s, _: request_state(s, stream.request.id))
    if told is None:
        raise NotFound(f"no request {id[:128]!r} waits or runs here")
    return JSONResponse(told)


@router.get("/metrics", openapi_extra=answers("text/plain"))
async def metrics(request: Request) -> Response:
    """The Prometheus exposition. Answers whether or not the engine does."""
    text = await asyncio.to_thread(service_of(request).metrics.text)  # the kernel's figure takes milliseconds to read
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def levels(service: Service, loop: asyncio.AbstractEventLoop) -> Levels:
    """The present levels, read from beside the engine thread: each figure is true, though not all at one instant."""
    scheduler, streams = service.engine.scheduler, service.streams
    ledger = scheduler.ledger
    running, waiting = list(scheduler.running), len(scheduler.waiting)
    rows = [one.rows for one in list(ledger.allocations.values())] + list(ledger.cached.values())
    reason = service.engine.status.blocked_by or "slot"
    return Levels(
        running=len(running),
        waiting={kind: waiting if kind == reason else 0 for kind in WAITING_FOR},
        held=sum(sequence.held for sequence in running),
        slots={
            "free": ledger.free_slots - len(ledger.cached),
            "running": len(ledger.allocations),
            "resident": len(ledger.cached),
        },
        budget_bytes=ledger.budget_bytes,
        committed_bytes=ledger.committed_bytes,
        formula_bytes=sum(map(ledger.layout.kv_bytes, rows)),
        kernel_bytes=service.engine.runner.pool.resident_bytes(),
        kept_bytes=ledger.cached_bytes,
        peak_demand_bytes=scheduler.admission.peak_demand_bytes,
        healthy=streams.sick() is None,
        draining=streams.drain_until is not None,
        tasks=len(asyncio.all_tasks(loop)),
        log_lines_dropped=logs.dropped(),
        guessed=scheduler.counts.drafted,
        accepted=scheduler.counts.accepted,
    )


def build_info(service: Service) -> dict[str, str]:
    """What is running, for tokenteller_build_info."""
    weights = service.engine.runner.decoder.storage
    return {"version": version("tokenteller"), "model": service.model_name, "weights": weights}


async def ask(service: Service, question: Callable[[Scheduler, Runner], T]) -> T:
    """The engine's answer between two steps. Raises Unavailable when it does not come within 2 s."""
    try:
        async with asyncio.timeout(2.0):
            return await asyncio.wrap_future(service.engine.ask(question))
    except TimeoutError:
        raise Unavailable("the engine did not answer within 2 s", retry_after_s=2) from None
