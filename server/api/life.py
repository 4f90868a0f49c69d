"""Life and end of a server: the watch over the engine's pulse, and the drain. On the event loop only."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from tokenteller.server.api.service import Service
from tokenteller.server.api.stream import Streams
from tokenteller.server.engine.heartbeat import Heartbeat

log = logging.getLogger("tokenteller")

TICK_S = 0.25


def seconds_in_line() -> dict[str, float]:
    """How long each thread of this process has been ready to run without a processor, by the kernel; Linux only."""
    waited = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):  # a thread that has just ended
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return waited


class Watch:
    """Compares the engine's pulse tick by tick; an engine without a new one for too long is stuck.

    It counts its own ticks and not the clock, so that a process that was stopped for a while finds no fault at waking;
    and of each tick only the part in which no thread of ours stood in line for a processor: to starve is not to hang.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._seen: Heartbeat | None = None
        self._still_s = 0.0
        self._in_line: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """One look. A verdict ends every stream; it is taken back when the engine goes on after all."""
        streams, pulse = self._streams, self._streams.engine.heartbeat
        in_line = seconds_in_line()
        starved = max((waited - self._in_line.get(thread, 0.0) for thread, waited in in_line.items()), default=0.0)
        self._in_line = in_line
        self._still_s += max(0.0, TICK_S - starved)
        if pulse is None or pulse != self._seen:
            self._still_s = 0.0
        self._seen = pulse
        stuck = pulse is not None and self._still_s >= pulse.deadline_s
        if stuck and pulse is not None and streams.stuck is None:
            streams.stuck = f"the engine made no progress for {pulse.deadline_s:.3g} s"
            log.error("engine stuck", extra={"fields": {"round": pulse.round, "patience_s": pulse.deadline_s}})
            streams.fail_all(streams.stuck)
        elif not stuck and streams.stuck is not None:
            log.warning("engine goes on", extra={"fields": {"stuck": streams.stuck}})
            streams.stuck = None


async def tell_stats(service: Service, every_s: float = 10.0) -> None:
    """A line of figures every so often, as long as there is anything to tell."""
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
    """The end: no new requests, running streams may finish until the deadline, then they end with `shutdown`.

    An engine that stays dead or stuck for as long ends the server too, with exit code 1, so that a supervisor sees it.
    """

    def __init__(self, streams: Streams, timeout_s: float) -> None:
        self._streams = streams
        self._timeout_s = timeout_s
        self._sick_since: float | None = None
        self.exit_code = 0

    def begin(self) -> None:
        """Starts to drain; a second call ends what still runs at the next tick."""
        now = time.monotonic()
        self._streams.drain_until = now + self._timeout_s if self._streams.drain_until is None else now

    @property
    def seconds_left(self) -> float:
        """Until the deadline of a drain that has begun."""
        assert self._streams.drain_until is not None
        return max(0.0, self._streams.drain_until - time.monotonic())

    def tick(self) -> bool:
        """Whether the server should close its sockets now."""
        streams = self._streams
        if streams.drain_until is not None:
            if len(streams) and not self.seconds_left:
                log.warning("ending streams", extra={"fields": {"streams": len(streams)}})
                streams.finish_all("shutdown")
            streams.closing = not len(streams)
        else:
            streams.closing = self._given_up()
        return streams.closing

    def _given_up(self) -> bool:
        now = time.monotonic()
        if self._streams.sick() is None:
            self._sick_since = None
            return False
        self._sick_since = self._sick_since or now
        if now - self._sick_since < max(self._timeout_s, 5.0):
            return False
        self.exit_code = 1
        self._streams.drain_until = now
        return True
