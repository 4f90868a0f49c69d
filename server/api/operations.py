"""Operations: health, readiness, metrics, the memory plan, slots, the live pool, single requests."""

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
from tokenteller.server.api.openapi import responds_with
from tokenteller.server.api.pool_feed import PoolFeed
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.engine.runner import Runner
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.waiting import request_state
from tokenteller.server.errors import NotFound, Unavailable
from tokenteller.server.gauges import WAITING_FOR, Levels

router = APIRouter()
T = TypeVar("T")

ANSWER_S = 2.0  # for the engine, which answers between two steps


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Liveness: the process is up and its engine neither dead nor stuck. Never waits for the engine."""
    service = service_of(request)
    reason = service.streams.unhealthy()
    if reason is None:
        return JSONResponse({"status": "ok", "model": service.model_name})
    return JSONResponse({"status": "stuck" if service.engine.alive else "dead", "reason": reason}, status_code=503)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Readiness: a request sent now would be accepted."""
    service = service_of(request)
    service.streams.check_ready()
    return JSONResponse({"status": "ready", "model": service.model_name})


@router.get("/plan")
async def plan(request: Request) -> JSONResponse:
    """The memory plan, the same as `tokenteller plan --json`."""
    return JSONResponse(service_of(request).plan.to_json())


@router.get("/slots")
async def slots(request: Request) -> JSONResponse:
    """Every slot, and the pool's bytes by the formula, by the ledger and by the kernel."""
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


@router.get("/pool", openapi_extra=responds_with("text/event-stream"))
async def pool(request: Request) -> Response:
    """The pool live, as SSE, five times a second."""
    feed: PoolFeed = request.app.state.pool_feed
    if request.scope.get("head"):
        return Response(media_type="text/event-stream", headers=sse.HEADERS)
    leave = feed.join()
    return sse.EventStreamResponse(feed.frames(), leave, {})


@router.get("/requests/{id}")
async def one_request(request: Request, id: str) -> JSONResponse:
    """An open request: why it waits and its latest start, or what it holds."""
    service = service_of(request)
    stream = service.streams.find(id)
    state = None if stream is None else await ask(service, lambda s, _: request_state(s, stream.request.id))
    if state is None:
        raise NotFound(f"no request {id[:128]!r} is waiting or running")
    return JSONResponse(state)


@router.get("/metrics", openapi_extra=responds_with("text/plain"))
async def metrics(request: Request) -> Response:
    """The Prometheus exposition. Works whatever the engine does."""
    text = await asyncio.to_thread(service_of(request).metrics.text)  # reading the kernel's figure takes milliseconds
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def levels(service: Service, loop: asyncio.AbstractEventLoop) -> Levels:
    """The gauges' values, read while the engine runs: each is true, though not all at the same instant."""
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
        healthy=streams.unhealthy() is None,
        draining=streams.drain_until is not None,
        tasks=len(asyncio.all_tasks(loop)),
        log_lines_dropped=logs.dropped(),
        draft_tokens=scheduler.counts.drafted,
        accepted_tokens=scheduler.counts.accepted,
    )


def build_info(service: Service) -> dict[str, str]:
    """The labels of tokenteller_build_info."""
    weights = service.engine.runner.decoder.storage
    return {"version": version("tokenteller"), "model": service.model_name, "weights": weights}


async def ask(service: Service, question: Callable[[Scheduler, Runner], T]) -> T:
    """The engine's answer, between two steps. Raises Unavailable after ANSWER_S."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.wrap_future(service.engine.ask(question))
    except TimeoutError:
        raise Unavailable(f"the engine did not answer within {ANSWER_S:g} s", retry_after_s=2) from None
