"""The composition root: builds the engine from settings and the routes around it."""

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
from tokenteller.model.kv_memory import KVLayout, KVPlan
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
from tokenteller.server.planning import make_plan, storage_of
from tokenteller.server.settings import ServeSettings

REFUSALS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A refusal or a failure, with its reason and numbers",
        "content": {"application/json": {"schema": error_schema()}},
    }
}


def create_app(settings: ServeSettings) -> FastAPI:
    """Loads the model, allocates and checks the pool; the engine starts with the app.

    Raises ConfigError or CheckpointError for the model, PoolMemoryError and ValueError for the memory.
    """
    _, layout, plan = make_plan(settings)
    threads = settings.threads or usable_cpus().usable
    use_threads(threads)
    if not layout.rows_that_fit(plan.pool_bytes):
        raise ValueError("; ".join(plan.advice))
    checkpoint, runner = _loaded(settings, layout, plan, threads)
    metrics = Metrics(checkpoint.name)
    scheduler = _scheduler(settings, layout, plan)
    one_row_s = _warmed(runner, checkpoint.name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def hand_over(receive: Callable[..., None], *what: list[Event] | str) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to read
                loop.call_soon_threadsafe(receive, *what)

        engine = Engine(
            scheduler,
            runner,
            deliver=lambda events: hand_over(streams.deliver, events),
            ended=lambda reason: hand_over(streams.end_all, reason),
            one_row_s=one_row_s,
            metrics=metrics,
        )
        streams = _streams(settings, checkpoint, engine, metrics)
        app.state.service = service = Service(settings, checkpoint.name, plan, engine, streams, metrics)
        app.state.pool_feed = PoolFeed(service)
        metrics.show_levels(lambda: operations.levels(service, loop), operations.build_info(service), layout)
        engine.start()
        tasks = [asyncio.create_task(work) for work in (Watchdog(streams).run(), log_stats(service))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(engine.stop)

    return _face(settings, lifespan, metrics)


def _loaded(settings: ServeSettings, layout: KVLayout, plan: KVPlan, threads: int) -> tuple[Checkpoint, Runner]:
    """The model, and a runner with a pool for it."""
    progress = Progress(sys.stderr)
    checkpoint = load(settings.model, storage_of(settings), settings.device, layout.max_context, progress)
    pool = KVPool(layout, plan.slots, settings.device, None if settings.kv_dtype else checkpoint.decoder.kv_dtype)
    pool.check(plan.pool_bytes)
    max_rows = plan.slots * (1 + settings.speculate) + settings.prefill_chunk
    return checkpoint, Runner(checkpoint.decoder, pool, max_rows, threads=threads)


def _scheduler(settings: ServeSettings, layout: KVLayout, plan: KVPlan) -> Scheduler:
    sure_rows = min(SURE_ROWS, settings.prefill_chunk)
    ledger = KVLedger(layout, plan.slots, plan.pool_bytes)
    admission = Admission(ledger, settings.admission, sure_rows)
    return Scheduler(
        admission,
        settings.prefill_chunk,
        token_gap_s=settings.token_gap / 1000 if settings.token_gap else None,
        bypass_limit=settings.bypass_limit,
        hold_limit_s=settings.slow_reader_timeout,
        explain=settings.explain or settings.explain_json,
        draft_tokens=settings.speculate,
    )


def _streams(settings: ServeSettings, checkpoint: Checkpoint, engine: Engine, metrics: Metrics) -> Streams:
    return Streams(
        engine,
        checkpoint.tokenizer,
        vocab_size=checkpoint.config.vocab_size,
        slow_reader_s=settings.slow_reader_timeout,
        queue_limits=QueueLimits(settings.queue_limit, settings.queue_tokens),
        model_name=checkpoint.name,
        metrics=metrics,
    )


def _warmed(runner: Runner, name: str) -> float:
    """Makes the first tokens. Returns the seconds that a step of one row takes."""
    try:
        runner.warm_up()
    except LogitsError as error:
        raise ValueError(f"{name}: the weights make no numbers: {error}") from error
    began = time.monotonic()
    runner.warm_up()  # once more, for its time
    one_row_s = time.monotonic() - began
    end_idle_threads()
    return one_row_s


def settle_process() -> None:
    """Tidies up after loading, in a process that does nothing but serve: it changes what a host process shares."""
    gc.collect()
    release_memory()
    gc.freeze()  # the libraries' objects live for ever: a full collection over them would stop every stream


def _face(settings: ServeSettings, lifespan: Lifespan[FastAPI], metrics: Metrics) -> FastAPI:
    """What the world sees: routes, the door in front of them, and errors in one form."""
    app = FastAPI(
        title="tokenteller",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=REFUSALS,
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
    """The framework's own refusals (no such path, no such method) in our form."""
    assert isinstance(error, HTTPException)
    ours = MethodNotAllowed if error.status_code == 405 else NotFound
    response = await _api_error(request, ours(f"{request.method} {request.url.path[:200]}: {error.detail}"))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response
