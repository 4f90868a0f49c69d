"""Puts the server together: model, pool, scheduler, engine, streams, and the endpoints in front of them."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Lifespan

from tokenteller.model.checkpoint import Checkpoint, Progress, load, release_memory
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.machine import usable_cpus
from tokenteller.model.sampler import LogitsError
from tokenteller.server.api import generate, openai, operations, page
from tokenteller.server.api.admission import QueueLimits
from tokenteller.server.api.lifecycle import Watchdog, log_stats
from tokenteller.server.api.middleware import Cors, Middleware
from tokenteller.server.api.pool_feed import PoolFeed
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.api.streams import Streams
from tokenteller.server.engine.admission import SURE_ROWS, Admission
from tokenteller.server.engine.engine import Engine
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.runner import Runner, end_idle_threads, use_threads
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Event
from tokenteller.server.errors import ApiError, MethodNotAllowed, NotFound, error_schema
from tokenteller.server.metrics import Metrics
from tokenteller.server.planning import Plan, check_memory, make_plan
from tokenteller.server.settings import ServeSettings

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "What went wrong, with the numbers",
        "content": {"application/json": {"schema": error_schema()}},
    }
}


def create_app(settings: ServeSettings, plan: Plan | None = None) -> FastAPI:
    """Loads the model and makes the pool; the engine starts and ends with the app. `plan`: what make_plan returned.

    Raises ConfigError or CheckpointError for the model, PoolMemoryError, MemoryError or ValueError for the memory.
    """
    plan = plan or make_plan(settings)
    check_memory(plan)
    checkpoint, runner = _load(settings, plan)
    name = settings.served_model_name or checkpoint.name
    metrics = Metrics(name)
    scheduler = _scheduler(settings, plan)
    one_row_s = _warm_up(runner, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def on_the_loop(receive: Callable[..., None], *what: list[Event] | str) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to read
                loop.call_soon_threadsafe(receive, *what)

        engine = Engine(
            scheduler,
            runner,
            deliver=lambda events: on_the_loop(streams.deliver, events),
            ended=lambda reason: on_the_loop(streams.end_all, reason),
            one_row_s=one_row_s,
            metrics=metrics,
        )
        streams = _streams(settings, checkpoint, name, engine, metrics)
        app.state.service = service = Service(settings, name, plan.kv, engine, streams, metrics)
        app.state.pool_feed = PoolFeed(service)
        metrics.show_levels(lambda: operations.levels(service, loop), operations.build_info(service), plan.layout)
        engine.start()
        tasks = [asyncio.create_task(work) for work in (Watchdog(streams).run(), log_stats(service))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(engine.stop)

    return _routes(settings, lifespan, metrics)


def _load(settings: ServeSettings, plan: Plan) -> tuple[Checkpoint, Runner]:
    """The model, and the runner that computes its steps in a pool of the planned size."""
    threads = settings.threads or usable_cpus().usable
    use_threads(threads)
    checkpoint = load(settings.model, plan.weights, settings.device, plan.layout.max_context, Progress(sys.stderr))
    as_the_weights = settings.kv_dtype == "auto" and settings.device != "cpu"
    kv_dtype = checkpoint.decoder.kv_dtype if as_the_weights else None
    pool = KVPool(plan.layout, plan.kv.slots, settings.device, kv_dtype)
    pool.check(plan.kv.pool_bytes)
    if settings.prefault:
        pool.prefault(plan.kv.pool_bytes)
    max_rows = plan.kv.slots * (1 + settings.draft_tokens) + settings.prefill_chunk
    return checkpoint, Runner(checkpoint.decoder, pool, max_rows, threads=threads)


def _scheduler(settings: ServeSettings, plan: Plan) -> Scheduler:
    sure_rows = min(SURE_ROWS, settings.prefill_chunk)
    ledger = KVLedger(plan.layout, plan.kv.slots, plan.kv.pool_bytes)
    admission = Admission(ledger, settings.admission, sure_rows)
    return Scheduler(
        admission,
        settings.prefill_chunk,
        token_gap_s=settings.token_gap / 1000 if settings.token_gap else None,
        hold_limit_s=settings.slow_reader_timeout,
        explain=settings.explain,
        draft_tokens=settings.draft_tokens,
    )


def _streams(settings: ServeSettings, checkpoint: Checkpoint, name: str, engine: Engine, metrics: Metrics) -> Streams:
    return Streams(
        engine,
        checkpoint.tokenizer,
        vocab_size=checkpoint.config.vocab_size,
        slow_reader_s=settings.slow_reader_timeout,
        queue_limits=QueueLimits(settings.queue_limit, settings.queue_tokens),
        model_name=name,
        metrics=metrics,
    )


def _warm_up(runner: Runner, name: str) -> float:
    """Makes the first tokens. Returns the seconds that a step of one row takes."""
    try:
        runner.warm_up()
    except LogitsError as error:
        raise ValueError(f"{name}: the weights give logits that are not numbers: {error}") from error
    began = time.monotonic()
    runner.warm_up()  # compiled and paged in by now
    one_row_s = time.monotonic() - began
    end_idle_threads()
    return one_row_s


def settle_process() -> None:
    """Frees what only loading needed. For a process that does nothing but serve, as it changes what all code shares."""
    gc.enable()
    release_memory()
    gc.freeze()  # what libraries keep for ever is never scanned: a full collection takes 0.2 s and stalls every stream


def _routes(settings: ServeSettings, lifespan: Lifespan[FastAPI], metrics: Metrics) -> FastAPI:
    """The endpoints, what guards them, and one shape for all errors."""
    app = FastAPI(
        title="tokenteller",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.add_middleware(Middleware, metrics=metrics, keys=[key.get_secret_value() for key in settings.api_key])
    if settings.cors_origin:  # outermost: a browser's preflight carries no key
        app.add_middleware(Cors, metrics=metrics, origins=settings.cors_origin)
    app.include_router(generate.router)
    app.include_router(openai.router)
    app.include_router(operations.router)
    page.attach(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    service_of(request).metrics.refused(error.code)
    request.state.error_code = error.code
    v1 = request.url.path.startswith("/v1/")
    return JSONResponse(error.body(v1=v1), status_code=error.status_for(v1=v1), headers=error.headers())


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """The framework's own errors (no such path, no such method) in our shape."""
    assert isinstance(error, HTTPException)
    ours = MethodNotAllowed if error.status_code == 405 else NotFound
    response = await _api_error(request, ours(f"{request.method} {request.url.path[:200]}: {error.detail}"))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response
