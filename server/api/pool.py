"""The live picture of the pool: taken only while somebody looks, a few times a second, once for all who look."""

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
VIEWERS = 32
WAITING_SHOWN = 20
POINTS = 120  # of a demand curve


class Picture:
    """What `GET /pool` streams. A viewer that is slow misses pictures; nobody waits for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pace = Pace(service.metrics)
        self._viewers: set[object] = set()
        self._task: asyncio.Task[None] | None = None
        self._taken = asyncio.Event()
        self._frame = b""
        self._last: dict[str, Any] = {}
        self._kernel_bytes = 0
        self._kernel_read_at = -math.inf

    def enter(self) -> Callable[[], None]:
        """One more looks, until what it gives back is called. Raises Unavailable when too many do already."""
        if len(self._viewers) >= VIEWERS:
            raise Unavailable(f"{VIEWERS} look at the pool already; come back later", retry_after_s=10)
        viewer = object()
        self._viewers.add(viewer)
        return lambda: self._viewers.discard(viewer)

    async def frames(self) -> AsyncIterator[bytes]:
        """One SSE frame after the other, until the server closes."""
        if self._task is None or self._task.done():
            self._taken = asyncio.Event()
            self._task = asyncio.create_task(self._keep_taking())
        task = self._task
        while True:
            await self._taken.wait()
            if task.done():
                return
            yield self._frame

    async def _keep_taking(self) -> None:
        try:
            while self._viewers and not self._service.streams.closing:
                self._frame = sse.frame(await self._take())
                taken, self._taken = self._taken, asyncio.Event()
                taken.set()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._taken.set()  # nobody waits for a picture that never comes

    async def _take(self) -> dict[str, Any]:
        service, now = self._service, time.monotonic()
        engine, streams = service.engine, service.streams
        if now - self._kernel_read_at > 1.0:  # it takes milliseconds to read
            self._kernel_read_at = now
            self._kernel_bytes = await asyncio.to_thread(engine.runner.pool.resident_bytes)
        with suppress(TimeoutError):  # a stuck engine shows its last picture
            async with asyncio.timeout(1.0):
                self._last = await asyncio.wrap_future(engine.ask(snapshot))
        sick, draining = streams.sick(), streams.drain_until is not None
        state = ("stuck" if engine.alive else "dead") if sick else "draining" if draining else "ok"
        for one in self._last.get("waiting", ()):
            one["waited_s"] = streams.waited_s(one["id"])
        picture = {"t": round(now, 3), "state": state, "kernel": self._kernel_bytes, "pace": self._pace.at(now)}
        return picture | self._last


def snapshot(scheduler: Scheduler, runner: Runner) -> dict[str, Any]:
    """Who holds what, who waits, and what is still to come. On the engine's thread, between two steps."""
    ledger, layout, timeline = scheduler.ledger, scheduler.ledger.layout, scheduler.timeline
    kept = ledger.cached_bytes
    held = ledger.committed_bytes - kept
    demand = scheduler.admission.running_demand()
    last = max([timeline.now + len(demand), *(s.reservation.end + 1 for s in scheduler.waiting if s.reservation)])
    steps = min(last - timeline.now, 8 * max(len(demand), 64))
    together = timeline.totals(timeline.now, steps)[BYTES]
    binds = "kv_bytes" if ledger.free_slots else "slot"
    shown = scheduler.waiting[:WAITING_SHOWN]
    return {
        "pool": {
            "budget": ledger.budget_bytes,
            "held": held,
            "kept": kept,
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
                "for": binds,
                "latest_s": latest_start_s(scheduler, s),
            }
            for s in shown
        ],
        "more_waiting": len(scheduler.waiting) - len(shown),
        "demand": {
            "seconds": seconds_until(scheduler, timeline.now + steps),
            "running": thinned(demand, steps),
            "all": thinned(together, steps),
        },
    }


def thinned(values: NDArray[np.int64], steps: int) -> list[int]:
    """A curve of at most POINTS points: the highest value of each stretch of `steps`, so that no peak is lost."""
    stretch = max(1, -(-steps // POINTS))
    padded = np.concatenate([values, np.zeros(-len(values) % stretch, values.dtype)])
    highest: list[int] = padded.reshape(-1, stretch).max(axis=1, initial=0).tolist()
    return highest


class Pace:
    """Tokens a second and the longest gaps, over the last second."""

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


def quantile(counts: list[int], share: float) -> float | None:
    """The value below which `share` of the gaps lie, interpolated in its bucket; None without any."""
    wanted, below = share * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *PER_TOKEN), (*PER_TOKEN, 2 * PER_TOKEN[-1]), strict=True):
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return None
