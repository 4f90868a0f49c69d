"""Clients of a soak: random requests, streamed and whole, of which many hang up, read slowly or are nonsense."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

WORDS = "speak the night is long and all our yesterdays have lighted fools the way to dusty death".split()
NONSENSE = (b"{", b'{"prompt": 1}', b'{"prompt": "x", "max_tokens": 1000000}', b"\xff")


class Clients:
    """What all clients share: the connection, the random numbers, and what they saw."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.http = http
        self.random = random.Random(seed)
        self.stopping = False
        self.seen: Counter[str] = Counter()
        self.tokens = 0
        self.gaps: list[tuple[float, float]] = []  # time, and seconds since the token before
        self.gaps_count_from = 0.0  # gaps that began earlier include a pause of this process
        self.checks = 0
        self.mismatches: list[str] = []

    def check(self, holds: bool, message: str) -> None:
        self.checks += 1
        if not holds:
            self.mismatches.append(f"{time.strftime('%H:%M:%S')} {message}")
            print("MISMATCH", self.mismatches[-1], file=sys.stderr, flush=True)

    async def run_one(self) -> None:
        """Sends one request after the other until the soak stops."""
        while not self.stopping:
            try:
                await self._request()
            except httpx.HTTPError as error:
                self.seen[f"failed: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)

    async def _request(self) -> None:
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
            await self._whole(body, hangs_up=dice < 0.07)
        else:
            await self._stream(body, hangs_up=dice < 0.45, slow=dice > 0.95)

    async def _nonsense(self) -> None:
        headers = {"Content-Type": "application/json"}
        answer = await self.http.post("/generate", content=self.random.choice(NONSENSE), headers=headers)
        self.check(answer.status_code in (400, 422), f"nonsense got {answer.status_code}")
        self.seen["nonsense"] += 1

    async def _whole(self, body: dict[str, Any], hangs_up: bool) -> None:
        request = self.http.post("/generate", json=body | {"stream": False})
        try:
            answer = await asyncio.wait_for(request, self.random.expovariate(1.0) if hangs_up else 600)
        except TimeoutError:
            self.seen["left"] += 1
            return
        if answer.status_code != 200:
            await self._refused(answer)
            return
        reply = answer.json()
        tokens, usage = sum(len(choice["token_ids"]) for choice in reply["choices"]), reply["usage"]
        self.check(usage["completion_tokens"] == tokens, f"{reply['id']}: usage is {usage}, {tokens} tokens came")
        self.seen["finished"] += 1

    async def _stream(self, body: dict[str, Any], hangs_up: bool, slow: bool) -> None:
        hang_up = time.monotonic() + self.random.expovariate(0.5) if hangs_up else math.inf
        tokens, last, usage = 0, 0.0, None
        async with self.http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                await self._refused(answer)
                return
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if now > hang_up:
                    self.seen["left"] += 1
                    return
                if slow:
                    await asyncio.sleep(0.05)
                frame: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: {") else {"type": ""}
                if frame["type"] == "token":
                    if last > self.gaps_count_from and not slow and body["n"] == 1:
                        self.gaps.append((now, now - last))
                    last = now
                    tokens += len(frame["token_ids"])
                    self.tokens += len(frame["token_ids"])
                elif frame["type"] == "end":
                    usage = frame["usage"]["completion_tokens"]
                elif frame["type"] == "error":
                    self.seen[f"error frame: {frame['error']['code']}"] += 1
                    return
        self.check(usage == tokens or body["n"] > 1, f"a stream's usage is {usage} tokens, {tokens} came")
        self.seen["finished"] += 1

    async def _refused(self, answer: httpx.Response) -> None:
        self.seen[f"refused {answer.status_code}"] += 1
        self.check(answer.status_code in (429, 503), f"{answer.status_code} is no refusal: {answer.text[:200]}")
        self.check("retry-after" in answer.headers, "a refusal without Retry-After")
        await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 1))) * self.random.random())
