"""A real server on port 0 with real sockets, in a thread of this process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tokenteller.server.api.service import Service
from tokenteller.server.embedded import embedded
from tokenteller.server.settings import ServeSettings


@dataclass
class Live:
    """A running server: its address, and its parts for checks that no endpoint offers."""

    url: str
    service: Service

    def post(self, path: str = "/generate", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def generate(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        """The answer of /generate as JSON."""
        response = self.post(prompt=prompt, stream=False, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: str | list[int], **body: Any) -> str:
        return str(self.generate(prompt, **body)["choices"][0]["text"])

    def stream(self, prompt: str | list[int], path: str = "/generate", **body: Any) -> list[dict[str, Any]]:
        """All frames of a streamed answer except [DONE], which must come last."""
        body = {"prompt": prompt, "stream": True, **body}
        with httpx.stream("POST", self.url + path, json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            raw = b"".join(response.iter_raw()).decode()
        return parse_sse(raw)

    def slots(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.url + "/slots", timeout=10).json()
        return answer

    def load(self) -> tuple[int, int]:
        """Sequences that run, and sequences that wait."""
        slots = self.slots()
        return sum(slot["state"] == "running" for slot in slots["slots"]), slots["waiting"]

    def wait_for(self, load: tuple[int, int], seconds: float = 10.0) -> None:
        """Until this many run and this many wait."""
        end = time.monotonic() + seconds
        while self.load() != load:
            assert time.monotonic() < end, f"expected {load}, got {self.load()}"
            time.sleep(0.01)

    def wait_idle(self, seconds: float = 10.0) -> dict[str, Any]:
        """The slots once nothing runs or waits."""
        end = time.monotonic() + seconds
        while True:
            slots = self.slots()
            if not slots["waiting"] and not any(slot["state"] == "running" for slot in slots["slots"]):
                return slots
            assert time.monotonic() < end, f"still busy: {slots}"
            time.sleep(0.02)


def parse_sse(raw: str) -> list[dict[str, Any]]:
    """The frames of strict SSE: LF only, one data line each and a blank line after it. Comments are skipped."""
    assert "\r" not in raw and raw.isascii()
    frames = []
    *events, rest = raw.split("\n\n")
    assert rest == "", f"the stream was cut: {rest!r}"
    for event in events:
        if event.startswith(":"):
            continue
        assert event.startswith("data: ") and "\n" not in event, event
        frames.append(event[6:])
    assert frames and frames[-1] == "[DONE]" and frames.count("[DONE]") == 1
    return [json.loads(frame) for frame in frames[:-1]]


def joined(frames: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a streamed answer."""
    return "".join(frame["text"] for frame in frames if frame["type"] == "token" and frame["index"] == index)


@contextmanager
def serve(pace: float = 0.0, send_buffer: int = 0, buffer_tokens: int = 0, **settings: Any) -> Iterator[Live]:
    """A server with these settings until the block ends.

    pace: seconds added to each step. send_buffer: bytes a connection may hold in the kernel. buffer_tokens: instead of
    the streams' own bound.
    """
    chosen = ServeSettings(**{"port": 0, "threads": 1, "shutdown_timeout": 0, **settings})  # the clients need a core
    with embedded(chosen) as server:
        if pace:
            runner = server.service.engine.runner
            run = runner.run
            runner.run = lambda step: (time.sleep(pace), run(step))[1]
        if buffer_tokens:
            server.service.streams.buffer_tokens = buffer_tokens
        if send_buffer:
            server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        yield Live(server.url, server.service)


@dataclass
class Process:
    """A server in its own process, started from the command line."""

    url: str
    popen: subprocess.Popen[str]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def exit_code(self, seconds: float = 20.0) -> int:
        return self.popen.wait(seconds)

    def status(self, path: str) -> int:
        return CLIENT.get(self.url + path).status_code


@contextmanager
def process(*flags: str, patch: str = "", stderr: Any = None) -> Iterator[Process]:
    """`tokenteller serve` with these flags until the block ends. `patch` is code to run first, to break something."""
    program = patch + "\nimport sys\nfrom tokenteller.server.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *flags]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert popen.stdout is not None
    try:
        line = next((line for line in popen.stdout if " ready on " in line), None)
        assert line, f"the server did not start: exit code {popen.wait(10)}"
        yield Process(line.split(" ready on ")[1].strip(), popen)
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# shared by all threads: every new client would load the machine's certificates first
CLIENT = httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60, trust_env=False)


def stream_raw(url: str, **body: Any) -> str:
    """A streamed answer as received, complete or not."""
    got = b""
    try:
        with CLIENT.stream("POST", url + "/generate", json={"prompt": "x", **body}) as response:
            for chunk in response.iter_raw():
                got += chunk
    except httpx.TransportError:
        pass
    return got.decode()
