"""A fake server on a real socket whose gaps, tokens and failures are known, and the load test run against it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import load_test
from measure.figures import summarise
from measure.load import run_load

SCRIPT = Path(load_test.__file__)
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 40}


@dataclass
class FakeServer:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    dropped: int = 0

    async def idle(self) -> None:
        """Waits until the server has seen every closed connection."""
        async with asyncio.timeout(5):
            while self.running:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[FakeServer]:
    """Serve one request a connection with `answer`; a socket that the client closes before the answer is dropped."""
    fake = FakeServer()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            models = b'{"object":"list","data":[{"id":"fake-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
            writer.close()
            return
        fake.arrivals.append(asyncio.get_running_loop().time())
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length
        body = json.loads(await reader.readexactly(int(length[1])))
        fake.bodies.append(body)
        fake.running += 1
        fake.peak = max(fake.peak, fake.running)
        gone = asyncio.create_task(reader.read(1))
        work = asyncio.ensure_future(answer(body, writer))
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        fake.dropped += not work.done() or work.exception() is not None  # the write after the drop may fail first
        fake.running -= 1
        work.cancel()
        gone.cancel()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


def stream(*steps: float | bytes, end: bool = True) -> Answer:
    """Bytes are one HTTP chunk each, numbers are seconds to wait; without `end` the socket closes in mid-body."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        writer.write(HEAD)
        due = loop.time()
        for step in steps:
            if isinstance(step, bytes):
                writer.write(b"%x\r\n%b\r\n" % (len(step), step))
                await writer.drain()
            else:
                due += step  # from due time to due time, so that waiting late does not add up
                await asyncio.sleep(max(0.0, due - loop.time()))
        writer.write(b"0\r\n\r\n" if end else b"")
        await writer.drain()

    return answer


def plain(head: bytes, body: bytes = b"") -> Answer:
    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    return answer


def in_turn(*answers: Answer) -> Answer:
    """The first request gets the first answer, and so on."""
    left = iter(answers)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await next(left)(body, writer)

    return answer


def sse(frame: object) -> bytes:
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def token(text: str = " tok", count: int = 4) -> bytes:
    return sse({"type": "token", "index": 0, "text": text, "token_ids": [5] * count})


def native_end(usage: dict[str, int] | None = USAGE, reason: str = "length") -> bytes:
    return sse({"type": "end", "index": 0, "finish_reason": reason} | ({"usage": usage} if usage else {})) + DONE


START = sse({"type": "start", "id": "r", "slot": 0, "prompt_tokens": 7})
QUICK = stream(START, token(), native_end())


def shape(endpoint: str) -> tuple[bytes, bytes, bytes]:
    """First frame without text, a text frame, and the end with usage, as the endpoint writes them."""
    if endpoint == "/generate":
        return START, token(), native_end()
    usage = sse({"choices": [], "usage": USAGE}) + DONE
    if endpoint == "/v1/completions":
        end = sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}) + usage
        return sse({"choices": [{"index": 0, "text": ""}]}), sse({"choices": [{"index": 0, "text": " tok"}]}), end
    end = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + usage
    role = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    return role, sse({"choices": [{"index": 0, "delta": {"content": " tok"}}]}), end


def gapped(endpoint: str) -> Answer:
    """An empty frame at once, text after 150 ms, then nine times 100 ms: 10 chunks of 4 tokens."""
    first, text, end = shape(endpoint)
    rest: list[float | bytes] = [0.1, text] * 9
    return stream(first, 0.15, text, *rest, end)


def arguments(url: str, *flags: str) -> argparse.Namespace:
    return load_test.parse(["--url", url, *flags])


def measure(answer: Answer, *flags: str) -> tuple[dict[str, Any], FakeServer]:
    async def go() -> tuple[dict[str, Any], FakeServer]:
        async with fake_server(answer) as fake:
            load = await run_load(arguments(fake.url, *flags))
            await fake.idle()
            return summarise(load), fake

    return asyncio.run(go())


async def run_script(*flags: str) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *flags, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()
