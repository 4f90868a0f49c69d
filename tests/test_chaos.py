"""Every kind of end at once, on raw sockets: afterwards all counters are back where they began."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live, serve

from tokenteller.server.api.protocol import HEAD_S
from tokenteller.server.engine.scheduler import Scheduler

CLIENTS = 40
WAYS = {  # weights
    "length": 20,
    "stop token": 8,
    "stop text": 8,
    "deadline": 8,
    "queue expiry": 6,
    "leaves queued": 10,
    "leaves in prefill": 10,
    "leaves in decode": 10,
    "leaves at any time": 10,
    "slow reader": 3,
    "too long": 4,
    "nonsense": 5,
}
NONSENSE = (b"{", b'{"prompt": 1}', b'{"prompt": "x", "top_p": 7}', b"\xff\xfe", b'{"prompt": "x", "unknown": 1}')


class Chaos:
    """Clients that end in every possible way, and what they and the server saw."""

    def __init__(self, live: Live, seed: int) -> None:
        self.live = live
        self.rng = random.Random(seed)
        self.address = live.url.removeprefix("http://").split(":")
        self.saw: Counter[str] = Counter()
        self.served: Counter[str] = Counter()  # how requests ended by the server's account
        self.texts: dict[str, set[str]] = defaultdict(set)  # all answers to requests that must always get the same one
        self.steps: list[float] = []
        self.freed: list[float] = []  # seconds from a cancel until its slots are free
        self.crossed: Counter[int] = Counter()  # steps that began between a cancel and its execution
        self.stopped_s = 0.0  # longest pause of the whole process
        self._watch()

    def _watch(self) -> None:
        service = self.live.service
        engine, metrics = service.engine, service.metrics
        served, freed, step, run, cancel = metrics.served, metrics.freed, metrics.step, engine.runner.run, engine.cancel
        began = [0]

        def note_served(one: Any) -> None:
            where = "queued" if one.slot is None else "in prefill" if one.ttft_s is None else "in decode"
            for reason in one.reasons:
                self.served[one.error or (f"left {where}" if reason == "cancelled" else reason)] += 1
            served(one)

        def note_cancel(request_id: str, index: int | None = None) -> None:
            seen = began[0]
            cancel(request_id, index)
            engine._inbox.put(lambda: self.crossed.update([began[0] - seen]))

        def counted(step: Any) -> Any:
            began[0] += bool(step.spans)
            return run(step)

        metrics.served = note_served  # type: ignore[method-assign]
        metrics.freed = lambda seconds: (self.freed.append(seconds), freed(seconds))[1]  # type: ignore[method-assign]
        metrics.step = lambda rows, seconds: (self.steps.append(seconds), step(rows, seconds))[1]  # type: ignore
        engine.runner.run = counted  # type: ignore[method-assign]
        engine.cancel = note_cancel  # type: ignore[method-assign]

    async def run(self, requests: int) -> None:
        whole = [way for way, times in WAYS.items() for _ in range(times)] * (1 + requests // 50)
        ways = iter(self.rng.sample(whole, requests))

        async def client() -> None:
            for way in ways:
                told = await asyncio.wait_for(self._one(way), 300)
                while way == "slow reader" and told == "queue full":  # they are rare
                    told = await asyncio.wait_for(self._one(way), 300)
                self.saw[told] += 1

        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.2)
                self.stopped_s = max(self.stopped_s, time.monotonic() - before)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        watching.cancel()

    def _body(self, way: str) -> dict[str, Any]:
        rng = self.rng
        family = rng.randrange(4)  # prompts of a family share a prefix
        prompt = [family * 50 + at % 40 for at in range(rng.choice((1, 5, 30, 60, 130)))] + [rng.randrange(3)]
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.choice((1, 4, 12, 30)),
            "temperature": 0,
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
            "cache_prefix": rng.random() < 0.8,
        }
        if rng.random() < 0.1:
            body["n"] = rng.choice((2, 3))
        if way == "stop token":
            body |= {"stop_token_ids": rng.sample(range(256), 64), "max_tokens": 60}
        elif way == "stop text":
            body |= {"stop": rng.sample("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRST", 16), "max_tokens": 60}
        elif way == "deadline":
            body |= {"deadline_ms": rng.choice((1, 10, 40)), "max_tokens": 90}
        elif way == "queue expiry":
            body |= {"max_queue_ms": 1, "deadline_ms": 3_600_000}
        elif way == "leaves in prefill":
            body |= {"prompt": [rng.randrange(256) for _ in range(180)], "max_tokens": 60, "stream": True}
        elif way == "leaves in decode":
            body |= {"max_tokens": 90, "stream": True}
        elif way == "slow reader":
            body |= {"max_tokens": 100, "stream": True, "logprobs": 20, "n": 2}
        elif way == "too long":
            body |= {"prompt": [1] * 300}
        return body

    async def _one(self, way: str) -> str:
        """Runs one request. Returns its outcome as the client saw it."""
        body = self._body(way)
        payload = self.rng.choice(NONSENSE) if way == "nonsense" else json.dumps(body).encode()
        sock = socket.socket()
        sock.setblocking(False)
        if way == "slow reader":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, (self.address[0], int(self.address[1])))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024 if way == "slow reader" else 2**16)
        head = (
            "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        try:
            return await self._outcome(way, body, reader)
        except ConnectionError:
            return "connection reset"
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _outcome(self, way: str, body: dict[str, Any], reader: asyncio.StreamReader) -> str:
        rng = self.rng
        if way == "leaves queued":
            await asyncio.sleep(rng.random() * 0.004)
            return way
        if way == "leaves at any time":
            await asyncio.sleep(rng.expovariate(20))
            return way
        if way in ("leaves in prefill", "leaves in decode"):
            mark = b'"type":"start"' if way == "leaves in prefill" else b'"type":"token"'
            got = b""
            while mark not in got:
                more = await reader.read(4096)
                if not more:
                    return self._read(way, body, got)
                got += more
            return way
        if way == "slow reader":
            ended, end = self.served["slow_reader"], time.monotonic() + 10
            while self.served["slow_reader"] == ended and time.monotonic() < end:
                await asyncio.sleep(0.1)  # its frames fill the socket buffers, then it is paused, then ended
        told = self._read(way, body, await _rest(reader))
        if told == "queue full":
            await asyncio.sleep(0.01)
        return told

    def _read(self, way: str, body: dict[str, Any], answer: bytes) -> str:
        if not answer and self.stopped_s > HEAD_S / 2:
            return "closed while the machine stood still"
        status = int(answer.split(b" ", 2)[1])
        if way == "nonsense":
            assert status in (400, 422), answer
            return way
        if status == 429:
            assert b"retry-after" in answer.lower()
            return "queue full"
        if way == "too long":
            assert status in (400, 422) and b"max_tokens_that_fits" in answer, answer
            return way
        assert status == 200, answer
        if way == "slow reader":
            return way if b"slow" in answer else "slow reader, but it was all sent"
        if body["stream"]:
            assert answer.rstrip().endswith((b"data: [DONE]", b"0")), answer[-200:]
            return f"{way}, streamed"
        told = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        assert len(told["choices"]) == body.get("n", 1)
        if way == "length":
            assert told["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1)
            self.texts[f"{body['prompt']} {body['max_tokens']}"] |= {choice["text"] for choice in told["choices"]}
        return way

    def idle(self) -> dict[str, Any]:
        """Everything that must be the same before and after."""
        slots = self.live.wait_idle()["slots"]
        page = httpx.get(self.live.url + "/metrics").text
        tasks = re.search(r"^tokenteller_tasks\S* (\S+)$", page, re.MULTILINE)
        streams, engine = self.live.service.streams, self.live.service.engine
        assert tasks and len(slots) == 8
        state = engine.ask(lambda scheduler, _: ledger_state(scheduler)).result(5)
        pool = self.live.slots()["pool"]
        time.sleep(0.2)  # the connection that asked has closed
        assert pool["resident_bytes"] == pool["committed_bytes"], "ledger and kernel disagree"
        return {
            "tasks": float(tasks[1]),
            "open files": open_files(),
            "streams": len(streams),
        } | state


def ledger_state(scheduler: Scheduler) -> dict[str, Any]:
    scheduler.check()
    ledger = scheduler.ledger
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "known": len(scheduler._live),
        "held": sum(sequence.held for sequence in scheduler.running),
        "allocated": ledger.allocated_bytes,
        "free slots": ledger.free_slots,
        "cached": sorted(ledger.cached) == sorted(scheduler.cache.ended),
        "demand": int(scheduler.timeline.totals(scheduler.timeline.now, 4096).sum()),
    }


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """The rest of the response."""
    got = b""
    while more := await reader.read(4096):
        got += more
    return got


def open_files() -> Counter[str]:
    """Open files of this process, by kind."""
    kinds: Counter[str] = Counter()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            kinds[re.sub(r"\d+", "", os.readlink(file))] += 1
    return kinds


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_every_kind_of_end_frees_everything(rand: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"slots": 8, "kv_memory": 512 * 1024, "prefill_chunk": 16, "queue_limit": 24}
    with serve(model=str(rand), send_buffer=4096, buffer_tokens=8, slow_reader_timeout=0.3, **settings) as live:
        chaos = Chaos(live, seed=count)
        asyncio.run(chaos.run(count // 10))  # allocates everything that is allocated once
        time.sleep(0.5)
        before, memory = chaos.idle(), resident_mib()
        began = time.monotonic()
        asyncio.run(chaos.run(count - count // 10))
        seconds = time.monotonic() - began
        end = time.monotonic() + 10
        while (after := chaos.idle()) != before and time.monotonic() < end:
            time.sleep(0.1)  # the last slow readers time out, the last connections close
        assert after == before
        assert before["allocated"] == before["demand"] == before["held"] == 0
        growth = resident_mib() - memory

    assert all(len(texts) == 1 for texts in chaos.texts.values()), "the same request got different answers"
    assert max(chaos.crossed) <= 1, "a cancel took more than the current step"
    for way in ("length", "stop", "deadline", "left queued", "left in prefill", "left in decode", "slow_reader"):
        assert chaos.served[way], (way, chaos.served)
    assert all(chaos.saw[way] for way in ("queue full", "too long", "nonsense")), chaos.saw
    with capsys.disabled():
        freed, steps = ([quantile(one, at) * 1000 for at in (0.5, 0.99)] for one in (chaos.freed, chaos.steps))
        print(f"\n{count} requests in {seconds:.0f} s; clients saw {dict(chaos.saw)}\nended {dict(chaos.served)}")
        print(f"memory grew by {growth:.1f} MiB; {len(chaos.freed)} freed by a cancel; steps crossed {chaos.crossed}")
        print(f"cancel to free ms p50, p99: {freed}; a step ms p50, p99: {steps}\n{before}")
    assert growth < 30
