"""Soak test: overload for minutes or hours, with clients that hang up, and checks that nothing grows or disagrees.

    tokenteller serve --slots 16 --kv-memory 6MiB --queue-limit 32
    python deploy/soak.py --url http://127.0.0.1:8000 --minutes 60

More clients than there are slots ask for random lengths, streamed and whole. A third hang up at a random moment, some
read slowly, some send nonsense, and refused ones come again. It fails, with exit code 1, on
  growth      of memory from the second to the last quarter of the time
  leaks       slots, tasks or open files that are still held when the server is idle again
  mismatches  of the ledger's bytes with the kernel's and with the sum of the slots, of usage with the tokens that came,
              of counters with what clients saw
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from typing import Any

import httpx
import numpy as np
from measure.arguments import number, server_url
from measure.clients import Clients

LEVELS = {
    "memory MiB": ("process_resident_memory_bytes", 2.0**-20),
    "open files": ("process_open_fds", 1.0),
    "tasks": ("tokenteller_tasks", 1.0),
}
MAX_GROWTH_MIB = 10.0
SAMPLE_S = 5.0


class Soak:
    """One run: its clients, and what is sampled beside them."""

    def __init__(self, http: httpx.AsyncClient, seconds: float, seed: int) -> None:
        self.http = http
        self.clients = Clients(http, seed)
        self.check = self.clients.check
        self.seconds = seconds
        self.samples: list[dict[str, float]] = []
        self.paused_s = 0.0

    async def run(self, clients: int) -> dict[str, Any]:
        before = await self._idle()
        watch, beat = asyncio.create_task(self._watch()), asyncio.create_task(self._notice_pauses())
        running = [asyncio.create_task(self.clients.run_one()) for _ in range(clients)]
        end = time.monotonic() + self.seconds
        while not watch.done() and (left := end + self.paused_s - time.monotonic()) > 0:
            await asyncio.wait({watch}, timeout=min(30.0, left))
            levels = "  ".join(f"{name} {self.samples[-1][name]:.1f}" for name in LEVELS) if self.samples else ""
            print(f"{self.seconds - end + time.monotonic():6.0f} s  {levels}", flush=True)
        self.clients.stopping = True
        _, late = await asyncio.wait(running, timeout=600)
        for task in late:
            task.cancel()
        await watch  # raises what ended it early
        beat.cancel()
        self.check(not late, f"{len(late)} clients still waited for an answer after ten minutes")
        await asyncio.sleep(8)  # until keep-alive connections are closed
        after = await self._idle()
        self._compare_counters(before, after)
        return self._report(before, after)

    async def _metrics(self) -> dict[str, float]:
        """Every sample of /metrics, without the label of the model."""
        text = (await self.http.get("/metrics")).text
        lines = re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        bare = ((name, re.sub(r'model_name="[^"]*"', "", labels).strip(","), value) for name, labels, value in lines)
        return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in bare}

    async def _notice_pauses(self) -> None:
        """A machine that others use may stop this process: such a time extends the run and is no gap of a stream."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.25)
            if (late := time.monotonic() - before - 0.25) > 2.0:
                self.paused_s += late
                self.clients.gaps_count_from = time.monotonic() + 1.0

    async def _watch(self) -> None:
        """Samples the levels, and between the samples checks the slots at random moments."""
        while not self.clients.stopping:
            try:
                figures = await self._metrics()
            except httpx.TransportError:  # a connection that was closed while this process was paused
                continue
            self.samples.append({name: figures.get(metric, 0.0) * unit for name, (metric, unit) in LEVELS.items()})
            until = time.monotonic() + SAMPLE_S
            while not self.clients.stopping and time.monotonic() < until:
                await self._check_slots()
                await asyncio.sleep(self.clients.random.uniform(0.05, 0.5))

    async def _check_slots(self) -> None:
        try:
            answer = await self.http.get("/slots")
        except httpx.TransportError:
            return
        if answer.status_code == 503:  # the engine was busy for 2 s, and says so
            self.clients.seen["slots: busy"] += 1
            return
        pool, slots = answer.json()["pool"], answer.json()["slots"]
        committed, budget = pool["committed_bytes"], pool["budget_bytes"]
        self.check(committed == sum(slot["bytes"] for slot in slots), f"the slots do not add up to {pool}")
        self.check(committed == pool["resident_bytes"], f"the kernel has another figure: {pool}")
        self.check(committed <= budget and pool["peak_demand_bytes"] <= budget, f"over budget: {pool}")
        self.check(all(slot["rows"] <= slot["rows_max"] for slot in slots), "a slot holds more than its maximum")

    async def _idle(self) -> dict[str, float]:
        """The metrics once nothing runs or waits. Half a minute is a mismatch."""
        end = time.monotonic() + 30
        while True:
            figures = await self._metrics()
            if not figures["vllm:num_requests_running"] + figures["vllm:num_requests_waiting"]:
                return figures
            if time.monotonic() > end:
                self.check(False, "slots are still held half a minute after the last client left")
                return figures
            await asyncio.sleep(0.2)

    def _compare_counters(self, before: dict[str, float], after: dict[str, float]) -> None:
        """With what clients saw. One that left may have been served or refused before the server knew."""
        grown, seen = {name: after[name] - before.get(name, 0.0) for name in after}, self.clients.seen
        refused, left = grown['tokenteller_refusals_total{code="queue_full"}'], seen["left"]
        self.check(seen["refused 429"] <= refused <= seen["refused 429"] + left, f"{refused} refusals counted, {seen}")
        served = grown["vllm:e2e_request_latency_seconds_count"]
        most = sum(n for kind, n in seen.items() if not kind.startswith(("refused", "nonsense", "slots")))
        self.check(seen["finished"] <= served <= most, f"{served} requests counted, {seen}")
        generated = grown["vllm:generation_tokens_total"]
        self.check(generated >= self.clients.tokens, f"{generated} tokens counted, {self.clients.tokens} came")
        for name in ("tokenteller_tasks", "process_open_fds"):
            self.check(after[name] <= before[name], f"{name}: {before[name]} before, {after[name]} after")

    def _report(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        clients, quarter = self.clients, max(1, len(self.samples) // 4)
        second, last = self.samples[quarter : 2 * quarter] or self.samples, self.samples[-quarter:]
        levels = {n: [round(float(np.median([one[n] for one in part])), 2) for part in (second, last)] for n in LEVELS}
        gaps = np.array([gap for _, gap in clients.gaps])
        quarters = np.array_split(gaps, 4) if len(gaps) >= 4 else []
        growth = levels["memory MiB"][1] - levels["memory MiB"][0]
        return {
            "seconds": round(self.seconds + self.paused_s),
            "paused_seconds": round(self.paused_s),
            "clients_saw": dict(clients.seen),
            "tokens": clients.tokens,
            "second_and_last_quarter": levels,
            "idle_before_and_after": {n: [before.get(m, 0) * u, after.get(m, 0) * u] for n, (m, u) in LEVELS.items()},
            "p99_itl_ms_by_quarter": [round(1000 * float(np.percentile(part, 99)), 1) for part in quarters],
            "checks": clients.checks,
            "mismatches": clients.mismatches,
            "passed": growth < MAX_GROWTH_MIB and not clients.mismatches,
        }


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits, trust_env=False) as http:
        return await Soak(http, options.minutes * 60, options.seed).run(options.clients)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--url", type=server_url, default="http://127.0.0.1:8000", help="(%(default)s)")
    parser.add_argument("--minutes", type=number(0, float, above=True), default=60.0, help="(%(default)g)")
    parser.add_argument("--clients", type=number(1), default=64, help="that send at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (%(default)s)")
    options = parser.parse_args()
    try:
        report = asyncio.run(soak(options))
    except httpx.TransportError as error:
        print(f"soak: lost the server at {options.url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
