"""A soak: hours of overload with clients that leave, and a watch for whatever grows or tells an untruth.

    tokenteller serve --slots 16 --kv-memory 6MiB --queue-limit 32
    python deploy/soak.py --url http://127.0.0.1:8000 --minutes 60

More clients than the server has room for ask for random lengths, streamed and whole; a third hang up at a random
moment, some read slowly, some send nonsense, and what is refused asks again. Beside them the server is asked what it
holds. It looks for
  growth:   memory, open files and tasks from the first to the last quarter of the time;
  leaks:    at the end, idle, all slots are free and as many tasks and files are open as in the beginning;
  untruths: the ledger's bytes against the kernel's and against the sum of the slots, usage against the tokens
            that came, counters against what clients saw.
Exit code 1 when it finds any. Imports nothing of the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from typing import Any

import httpx

WORDS = "speak the night is long and all our yesterdays have lighted fools the way to dusty death".split()
LEVELS = {
    "memory MiB": ("process_resident_memory_bytes", 2.0**-20),
    "open files": ("process_open_fds", 1.0),
    "tasks": ("tokenteller_tasks", 1.0),
}
MOST_MEMORY_GROWTH_MIB = 10.0


class Soak:
    """One run: its clients, its watch and what they found."""

    def __init__(self, client: httpx.AsyncClient, seconds: float, seed: int) -> None:
        self.client = client
        self.seconds = seconds
        self.random = random.Random(seed)
        self.ended = False
        self.saw: Counter[str] = Counter()
        self.tokens = 0
        self.gaps: list[tuple[float, float]] = []  # when, seconds
        self.samples: list[dict[str, float]] = []
        self.untruths: list[str] = []
        self.checks = 0
        self.stood_still_s = 0.0
        self.awake_since = 0.0

    def check(self, true: bool, what: str) -> None:
        self.checks += 1
        if not true:
            self.untruths.append(f"{time.strftime('%H:%M:%S')} {what}")
            print("UNTRUE", self.untruths[-1], file=sys.stderr, flush=True)

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, without the model's label."""
        text = (await self.client.get("/metrics")).text
        lines = re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        bare = ((name, re.sub(r'model_name="[^"]*"', "", labels).strip(","), value) for name, labels, value in lines)
        return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in bare}

    # The clients

    async def visitor(self) -> None:
        while not self.ended:
            try:
                await self._visit()
            except httpx.HTTPError as error:
                self.saw[f"failed: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)

    async def _visit(self) -> None:
        dice = self.random.random()
        body: dict[str, Any] = {
            "prompt": " ".join(self.random.choices(WORDS, k=self.random.choice((3, 10, 40, 200)))),
            "max_tokens": self.random.choice((1, 8, 32, 64, 128, 400)),
            "temperature": self.random.choice((0, 1)),
            "n": 2 if dice > 0.97 else 1,
        }
        if dice < 0.03:
            await self._nonsense()
        elif dice < 0.15:
            await self._whole(body, leaves=dice < 0.07)
        else:
            await self._stream(body, leaves=dice < 0.45, slow=dice > 0.95)

    async def _nonsense(self) -> None:
        body = self.random.choice((b"{", b'{"prompt": 1}', b'{"prompt": "x", "max_tokens": 1000000}', b"\xff"))
        answer = await self.client.post("/generate", content=body, headers={"Content-Type": "application/json"})
        self.check(answer.status_code in (400, 422), f"nonsense got {answer.status_code}")
        self.saw["nonsense"] += 1

    async def _whole(self, body: dict[str, Any], leaves: bool) -> None:
        asked = self.client.post("/generate", json=body | {"stream": False})
        try:
            answer = await asyncio.wait_for(asked, self.random.expovariate(1.0) if leaves else 600)
        except TimeoutError:
            self.saw["left"] += 1
            return
        if answer.status_code != 200:
            await self._refused(answer)
            return
        told = answer.json()
        came = sum(len(choice["token_ids"]) for choice in told["choices"])
        self.check(told["usage"]["completion_tokens"] == came, f"usage of {told['id']}: {told['usage']}, {came} came")
        self.saw["finished"] += 1

    async def _stream(self, body: dict[str, Any], leaves: bool, slow: bool) -> None:
        end = time.monotonic() + self.random.expovariate(0.5) if leaves else float("inf")
        came, last, told = 0, 0.0, None
        async with self.client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                await self._refused(answer)
                return
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if now > end:
                    self.saw["left"] += 1
                    return
                if slow:
                    await asyncio.sleep(0.05)
                if not line.startswith("data: {"):
                    continue
                frame = json.loads(line[6:])
                if frame["type"] == "token":
                    if last > self.awake_since and not slow and body["n"] == 1:
                        self.gaps.append((now, now - last))
                    last = now
                    came += len(frame["token_ids"])
                    self.tokens += len(frame["token_ids"])
                elif frame["type"] == "end":
                    told = frame["usage"]["completion_tokens"]
                elif frame["type"] == "error":
                    self.saw[f"error frame: {frame['error']['code']}"] += 1
                    return
        self.check(told == came or body["n"] > 1, f"a stream's usage says {told} tokens, {came} came")
        self.saw["finished"] += 1

    async def _refused(self, answer: httpx.Response) -> None:
        self.saw[f"refused {answer.status_code}"] += 1
        self.check(answer.status_code in (429, 503), f"refused {answer.text[:200]}")
        self.check("retry-after" in answer.headers, "a refusal without Retry-After")
        await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 1))) * self.random.random())

    # The watch

    async def beat(self) -> None:
        """Notices when this process was stopped, as on a machine that is lent out: no gap of such a time counts."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.25)
            if (late := time.monotonic() - before - 0.25) > 2.0:
                self.stood_still_s += late
                self.awake_since = time.monotonic() + 1.0

    async def watch(self, every_s: float) -> None:
        """A sample every so often, and a look at the slots at moments that nobody can foresee."""
        began = time.monotonic()
        while not self.ended:
            try:
                figures = await self.metrics()
            except httpx.TransportError:  # a connection that was closed while this process stood still
                continue
            sample = {name: figures.get(family, 0.0) * unit for name, (family, unit) in LEVELS.items()}
            sample |= {"at": time.monotonic() - began, "tokens": figures["vllm:generation_tokens_total"]}
            self.samples.append(sample)
            until = time.monotonic() + every_s
            while not self.ended and time.monotonic() < until:
                await self._look()
                await asyncio.sleep(self.random.uniform(0.05, 0.5))

    async def _look(self) -> None:
        try:
            answer = await self.client.get("/slots")
        except httpx.TransportError:
            return
        if answer.status_code == 503:  # the engine had no time within 2 s; it says so
            self.saw["slots: busy"] += 1
            return
        told = answer.json()
        pool, slots = told["pool"], told["slots"]
        committed = pool["committed_bytes"]
        self.check(committed == sum(slot["bytes"] for slot in slots), f"the slots do not add up: {pool}")
        self.check(committed == pool["resident_bytes"], f"the kernel has another figure: {pool}")
        self.check(committed <= pool["budget_bytes"] and pool["peak_demand_bytes"] <= pool["budget_bytes"], f"{pool}")
        self.check(all(slot["rows"] <= slot["rows_max"] for slot in slots), "a slot holds more than it may")

    async def idle(self) -> dict[str, float]:
        """The figures once nothing runs or waits; fails after half a minute."""
        end = time.monotonic() + 30
        while True:
            figures = await self.metrics()
            if not figures["vllm:num_requests_running"] + figures["vllm:num_requests_waiting"]:
                return figures
            if time.monotonic() > end:
                self.check(False, "slots are still held half a minute after the last client left")
                return figures
            await asyncio.sleep(0.2)

    async def run(self, clients: int) -> dict[str, Any]:
        before = await self.idle()
        watch = asyncio.create_task(self.watch(every_s=5.0))
        beat = asyncio.create_task(self.beat())
        visitors = [asyncio.create_task(self.visitor()) for _ in range(clients)]
        end = time.monotonic() + self.seconds
        while (left := end + self.stood_still_s - time.monotonic()) > 0:
            await asyncio.wait({watch}, timeout=min(30.0, left))
            if watch.done():
                break  # its fault is raised below
            sample = self.samples[-1]
            print(f"{sample['at']:6.0f} s  " + "  ".join(f"{name} {sample[name]:.1f}" for name in LEVELS), flush=True)
        self.ended = True
        _, late = await asyncio.wait(visitors, timeout=600)
        for task in late:
            task.cancel()
        await watch
        beat.cancel()
        self.check(not late, f"{len(late)} clients still waited for an answer after ten minutes")
        await asyncio.sleep(8)  # keep-alive connections close
        after = await self.idle()
        self._compare({name: after[name] - before.get(name, 0.0) for name in after}, before, after)
        return self.report(before, after)

    def _compare(self, grown: dict[str, float], before: dict[str, float], after: dict[str, float]) -> None:
        """Counters against what clients saw; one who left may have been served or refused before the server knew."""
        refused = grown['tokenteller_refusals_total{code="queue_full"}']
        seen, left = self.saw["refused 429"], self.saw["left"]
        self.check(seen <= refused <= seen + left, f"{refused} refusals counted, {seen} seen")
        served = grown["vllm:e2e_request_latency_seconds_count"]
        most = sum(n for kind, n in self.saw.items() if not kind.startswith(("refused", "nonsense", "slots")))
        self.check(self.saw["finished"] <= served <= most, f"{served} requests counted, {self.saw} seen")
        self.check(grown["vllm:generation_tokens_total"] >= self.tokens, "fewer tokens counted than came")
        for name in ("tokenteller_tasks", "process_open_fds"):
            self.check(after[name] <= before[name], f"{name}: {before[name]} before, {after[name]} after")

    def report(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        quarter = max(1, len(self.samples) // 4)
        first, last = self.samples[quarter : 2 * quarter] or self.samples, self.samples[-quarter:]
        levels = {name: [median([one[name] for one in part]) for part in (first, last)] for name in LEVELS}
        start = min((when for when, _ in self.gaps), default=0.0)
        length = max((when for when, _ in self.gaps), default=0.0) - start + 1e-9
        parts = [[gap for when, gap in self.gaps if at <= (when - start) / length * 4 < at + 1] for at in range(4)]
        growth = levels["memory MiB"][1] - levels["memory MiB"][0]
        return {
            "seconds": round(self.samples[-1]["at"]),
            "of_which_stood_still": round(self.stood_still_s),
            "clients_saw": dict(self.saw),
            "tokens": self.tokens,
            "second_and_last_quarter": levels,
            "idle_before_and_after": {n: [before.get(f, 0) * u, after.get(f, 0) * u] for n, (f, u) in LEVELS.items()},
            "p99_gap_ms_by_quarter": [round(1000 * quantile(part, 0.99), 1) for part in parts],
            "checks": self.checks,
            "untruths": self.untruths,
            "flat": growth < MOST_MEMORY_GROWTH_MIB and not self.untruths,
        }


def median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 2)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits, trust_env=False) as client:
        return await Soak(client, options.minutes * 60, options.seed).run(options.clients)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    report = asyncio.run(soak(parser.parse_args()))
    print(json.dumps(report, indent=1))
    return 0 if report["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
