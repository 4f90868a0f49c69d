"""GET /pool: snapshots of the pool as SSE. Taken only while somebody watches, and once for all who do."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenteller.server.api import sse
from tokenteller.server.api.service import Service
from tokenteller.server.engine.demand import BYTES
from tokenteller.server.engine.runner import Runner
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.waiting import latest_start_s, seconds_until
from tokenteller.server.errors import Unavailable
from tokenteller.server.metrics import PER_TOKEN, Metrics

PERIOD_S = 0.2
MAX_VIEWERS = 32
WAITING_SHOWN = 20
CURVE_POINTS = 120


class PoolFeed:
    """A snapshot every PERIOD_S for all viewers. A slow viewer misses some; nobody waits for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rates = Rates(service.metrics)
        self._viewers: set[object] = set()
        self._task: asyncio.Task[None] | None = None
        self._updated = asyncio.Event()
        self._frame = b""
        self._snapshot: dict[str, Any] = {}
        self._kernel_bytes = 0
        self._kernel_read_at = -math.inf

    def join(self) -> Callable[[], None]:
        """Registers a viewer; the function it returns removes it. Raises Unavailable if there are too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise Unavailable(f"the limit of {MAX_VIEWERS} viewers is reached; retry later", retry_after_s=10)
        viewer = object()
        self._viewers.add(viewer)
        return lambda: self._viewers.discard(viewer)

    async def frames(self) -> AsyncIterator[bytes]:
        """SSE frames until the server shuts down."""
        if self._task is None or self._task.done():
            self._updated = asyncio.Event()
            self._task = asyncio.create_task(self._run())
        task = self._task
        while True:
            await self._updated.wait()
            if task.done():
                return
            yield self._frame

    async def _run(self) -> None:
        try:
            while self._viewers and not self._service.streams.closing:
                self._frame = sse.frame(await self._take())
                updated, self._updated = self._updated, asyncio.Event()
                updated.set()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._updated.set()  # nobody may wait for a snapshot that never comes

    async def _take(self) -> dict[str, Any]:
        service, now = self._service, time.monotonic()
        engine, streams = service.engine, service.streams
        if now - self._kernel_read_at > 1.0:  # reading it takes milliseconds
            self._kernel_read_at = now
            self._kernel_bytes = await asyncio.to_thread(engine.runner.pool.resident_bytes)
        with suppress(TimeoutError):  # a stuck engine shows its last snapshot
            async with asyncio.timeout(1.0):
                self._snapshot = await asyncio.wrap_future(engine.ask(snapshot))
        state = "draining" if streams.drain_until is not None else "ok"
        if streams.unhealthy():
            state = "stuck" if engine.alive else "dead"
        for waiting in self._snapshot.get("waiting", ()):
            waiting["waited_s"] = streams.waited_s(waiting["id"])
        fields = {"t": round(now, 3), "state": state, "kernel": self._kernel_bytes, "pace": self._rates.at(now)}
        return fields | self._snapshot


def snapshot(scheduler: Scheduler, runner: Runner) -> dict[str, Any]:
    """Slots, bytes, queue and future demand, between two steps. Runs on the engine thread."""
    ledger, layout, timeline = scheduler.ledger, scheduler.ledger.layout, scheduler.timeline
    cached = ledger.cached_bytes
    held = ledger.committed_bytes - cached
    demand = scheduler.admission.running_demand()
    last = max([timeline.now + len(demand), *(s.reservation.end + 1 for s in scheduler.waiting if s.reservation)])
    steps = min(last - timeline.now, 8 * max(len(demand), 64))
    with_waiting = timeline.totals(timeline.now, steps)[BYTES]
    reason = "kv_bytes" if ledger.free_slots else "slot"
    shown = scheduler.waiting[:WAITING_SHOWN]
    return {
        "pool": {
            "budget": ledger.budget_bytes,
            "held": held,
            "kept": cached,
            "owed": max(0, int(demand.max(initial=0)) - held),
        },
        "slots": ledger.slots,
        "running": [[s.slot, s.computed, s.request.rows_max, s.request.id, s.index, s.held] for s in scheduler.running],
        "resident": [[slot, rows] for slot, rows in ledger.cached.items()],
        "waiting": [
            {
                "id": s.request.id,
                "index": s.index,
                "bytes": layout.committed(s.request.rows_max),
                "for": reason,
                "latest_s": latest_start_s(scheduler, s),
            }
            for s in shown
        ],
        "more_waiting": len(scheduler.waiting) - len(shown),
        "demand": {
            "seconds": seconds_until(scheduler, timeline.now + steps),
            "running": downsampled(demand, steps),
            "all": downsampled(with_waiting, steps),
        },
    }


def downsampled(values: NDArray[np.int64], steps: int) -> list[int]:
    """A curve over `steps` as at most CURVE_POINTS points: the maximum of each stretch, so no peak is lost."""
    stretch = max(1, -(-steps // CURVE_POINTS))
    padded = np.concatenate([values, np.zeros(-len(values) % stretch, values.dtype)])
    maxima: list[int] = padded.reshape(-1, stretch).max(axis=1, initial=0).tolist()
    return maxima


class Rates:
    """Tokens per second and the 99th percentile of token gaps, over the last second."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._past: deque[tuple[float, int, list[int]]] = deque()

    def at(self, now: float) -> dict[str, float | None]:
        self._past.append((now, self._metrics.tokens_generated, self._metrics.gaps.counts()))
        while self._past[0][0] < now - 1.0 and len(self._past) > 2:
            self._past.popleft()
        then, tokens, counts = self._past[0]
        _, tokens_now, counts_now = self._past[-1]
        gap = quantile([new - old for old, new in zip(counts, counts_now, strict=True)], 0.99)
        return {
            "tokens_per_s": round((tokens_now - tokens) / max(now - then, 1e-3), 1),
            "gap_p99_ms": None if gap is None else round(gap * 1000, 2),
        }


def quantile(counts: list[int], q: float) -> float | None:
    """The q-quantile of a PER_TOKEN histogram, interpolated inside its bucket; None if it is empty."""
    rank, below = q * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *PER_TOKEN), (*PER_TOKEN, 2 * PER_TOKEN[-1]), strict=True):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return None
