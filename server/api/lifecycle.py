"""While the server runs: the engine watchdog and the statistics line; at its end: draining. On the event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from tokenteller.server.api.service import Service
from tokenteller.server.api.streams import Streams
from tokenteller.server.engine.heartbeat import Heartbeat

log = logging.getLogger("tokenteller")

TICK_S = 0.25
GIVE_UP_S = 5.0  # how long an unhealthy engine is given at least, whatever --shutdown-timeout says


def run_queue_seconds() -> dict[str, float]:
    """Per thread of this process, seconds spent runnable but waiting for a CPU. Empty where there is no /proc."""
    waited = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):  # the thread has just ended
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return waited


class Watchdog:
    """Declares the engine stuck when its heartbeat does not change for too long.

    Time is counted in ticks, not by the clock, so a process that was suspended finds nothing wrong when it wakes. Time
    in which one of our threads waited for a CPU does not count either: a starved engine is not a stuck one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Heartbeat | None = None
        self._still_s = 0.0
        self._waited: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """One check. A stuck engine fails every stream; it is trusted again as soon as it moves."""
        streams, heartbeat = self._streams, self._streams.engine.heartbeat
        waited = run_queue_seconds()
        starved_s = max((seconds - self._waited.get(thread, 0.0) for thread, seconds in waited.items()), default=0.0)
        self._waited = waited
        self._still_s += max(0.0, TICK_S - starved_s)
        if heartbeat is None or heartbeat != self._last:
            self._still_s = 0.0
        self._last = heartbeat
        if heartbeat is not None and self._still_s >= heartbeat.deadline_s:
            if streams.stuck is None:
                streams.stuck = f"the engine made no progress for {heartbeat.deadline_s:.3g} s"
                fields = {"round": heartbeat.round, "deadline_s": heartbeat.deadline_s}
                log.error("engine stuck", extra={"fields": fields})
                streams.fail_all(streams.stuck)
        elif streams.stuck is not None:
            log.warning("engine recovered", extra={"fields": {"stuck": streams.stuck}})
            streams.stuck = None


async def log_stats(service: Service, every_s: float = 10.0) -> None:
    """Logs throughput and load every `every_s` seconds, unless the server is idle."""
    metrics, engine = service.metrics, service.engine
    tokens, requests = metrics.tokens_generated, metrics.requests_served
    while True:
        began = time.monotonic()
        await asyncio.sleep(every_s)
        seconds = time.monotonic() - began
        new_tokens, new_requests = metrics.tokens_generated - tokens, metrics.requests_served - requests
        tokens, requests = metrics.tokens_generated, metrics.requests_served
        scheduler = engine.scheduler
        if not (new_tokens or new_requests or scheduler.waiting):
            continue
        fields = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": round(scheduler.ledger.committed_bytes / scheduler.ledger.budget_bytes, 4),
            "tokens_per_s": round(new_tokens / seconds, 1),
            "requests_per_s": round(new_requests / seconds, 2),
            "step_ms": round(engine.status.step_seconds * 1000, 2),
        }
        log.info("stats", extra={"fields": fields})


class Drain:
    """Shutdown: refuse new requests, let running streams finish until the deadline, end the rest with `shutdown`.

    An engine that stays dead or stuck ends the server too, with exit code 1, so that a supervisor restarts it.
    """

    def __init__(self, streams: Streams, timeout_s: float) -> None:
        self._streams = streams
        self._timeout_s = timeout_s
        self._unhealthy_since: float | None = None
        self.exit_code = 0

    def begin(self) -> None:
        """Starts draining. A second call moves the deadline to now."""
        now = time.monotonic()
        self._streams.drain_until = now + self._timeout_s if self._streams.drain_until is None else now

    @property
    def seconds_left(self) -> float:
        """Until the deadline, once draining."""
        assert self._streams.drain_until is not None
        return max(0.0, self._streams.drain_until - time.monotonic())

    def tick(self) -> bool:
        """Whether to close the sockets now."""
        streams = self._streams
        if streams.drain_until is not None:
            if len(streams) and not self.seconds_left:
                log.warning("ending streams", extra={"fields": {"streams": len(streams)}})
                streams.finish_all("shutdown")
            streams.closing = not len(streams)
        else:
            streams.closing = self._engine_is_lost()
        return streams.closing

    def _engine_is_lost(self) -> bool:
        now = time.monotonic()
        if self._streams.unhealthy() is None:
            self._unhealthy_since = None
            return False
        self._unhealthy_since = self._unhealthy_since or now
        if now - self._unhealthy_since < max(self._timeout_s, GIVE_UP_S):
            return False
        self.exit_code = 1
        self._streams.drain_until = now
        return True
