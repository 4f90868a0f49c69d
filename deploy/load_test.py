"""Load test for a server that streams generated text, run from outside over HTTP.

    python deploy/load_test.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64 --ignore-eos
    python deploy/load_test.py --url http://127.0.0.1:8000 --rate 4 --duration 60 --goodput ttft:200 tpot:50 e2el:2000
    python deploy/load_test.py --url http://127.0.0.1:8000 --endpoint /v1/completions --prompt-tokens lognormal:5,0.8

Endpoints: the native one (a path that ends in /generate), OpenAI's /v1/completions and /v1/chat/completions.

Closed loop (--concurrency N): N clients, each sends its next request when the last one has ended; for throughput.
Open loop (--rate R): requests arrive at R a second whatever the server does; for latency. Never both at once.

Figures, in ms by this client's clock; requests that ended in order count, with the tokens the server gave as usage:
  TTFT   POST written -> first frame with non-empty text (a start frame or a chat role is no token)
  TPOT   (E2E - TTFT) / (output tokens - 1), one value a request; a one-token answer has none (0 for goodput)
  ITL    gap between neighbouring token frames, all requests pooled; a frame may carry several tokens
  E2E    POST written -> last token frame (not the usage frame, not [DONE])
  client wait   due time (open loop) or previous end (closed loop) -> POST written: waiting for --max-concurrency,
                connecting, and any lag of this client; it is in none of the figures above
  goodput       requests a second that met every --goodput limit; SLO attainment = good / (completed + failed)
Rates are over the whole run, from the first moment to the last reply's end:
--duration stops the sending, what is under way may finish. A refused request (429, 503) is counted and never retried;
in a closed loop its client sends the next one at once. Text prompts are counted in words; usage says how many tokens.
Exit code: 0; 1 when every request failed; 2 for bad arguments; 130 after Ctrl-C, which prints what there is so far.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

TEXT = """apple river stone garden window bridge summer winter letter paper candle forest island mountain market
    kitchen table mirror engine wheel copper silver golden yellow purple orange bottle basket ladder hammer needle
    thread button pocket jacket helmet camera guitar violin trumpet rabbit horse sheep tiger eagle spider butter
    cheese pepper sugar honey lemon cherry carrot potato onion bread soup salad dinner lunch morning evening
    station train ticket journey harbor sailor captain doctor teacher artist farmer baker singer writer reader
    number circle square corner center distance signal planet comet rocket thunder shadow desert valley meadow"""
WORDS = TEXT.split()

LINE_END = re.compile(rb"\r\n|\r|\n")  # the only line ends of SSE; U+2028 and U+0085 are text
SLICE = 64  # frames parsed before other streams get their turn
BUSY = 0.8  # share of a core from which this client, and not the server, may be what is measured
LATE_MS = 100.0  # likewise, for the usual delay between a request's due time and its POST
DROP_DELAY_S = 0.1
WARMUP_INDEX = 1 << 30  # apart from the measured requests, whose prompts must be new to a prefix cache
NOT_FAILED = ("ok", "aborted", "unfinished")
BAD_FINISH = ("error", "cancelled", "deadline", "shutdown", "abort")
GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: `128`, `32:256` (uniform) or `lognormal:MU,SIGMA[,MAX]`."""

    spec: str
    low: int = 1
    high: int = 1 << 20
    mu_sigma: tuple[float, float] | None = None

    @staticmethod
    def parse(spec: str) -> "Lengths":
        help_text = f"{spec!r}: want a count (128), a range (32:256) or lognormal:MU,SIGMA[,MAX] (lognormal:5,0.8)"
        try:
            if spec.startswith("lognormal:"):
                mu, sigma, *limit = (float(part) for part in spec.removeprefix("lognormal:").split(","))
                out = Lengths(spec, high=int(limit[0]) if limit else 1 << 20, mu_sigma=(mu, sigma))
                good = len(limit) < 2 and math.isfinite(mu) and 0 <= sigma < math.inf
            else:
                low, *rest = (int(part) for part in spec.split(":"))
                out = Lengths(spec, low, rest[0] if rest else low)
                good = len(rest) < 2
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(help_text) from None
        if not good or not 1 <= out.low <= out.high:
            raise argparse.ArgumentTypeError(f"{help_text}, at least 1 and the smaller end first")
        return out

    def draw(self, rng: random.Random) -> int:
        if self.mu_sigma is None:
            return rng.randint(self.low, self.high)
        exponent = min(rng.gauss(*self.mu_sigma), 64.0)  # exp() must not overflow
        return min(max(round(math.exp(exponent)), self.low), self.high)


@dataclass(frozen=True)
class Drop:
    """When this client closes the socket on purpose: after `delay` seconds or `chunks` chunks, whichever is first."""

    delay: float
    chunks: int


@dataclass
class Transfer:
    """One request on the wire: every chunk with its arrival, and what went wrong with the connection, if anything."""

    sent: float = 0.0  # when the request's last byte was written; 0 if it never was
    status: int = 0
    retry_after: str = ""
    fault: str = ""
    detail: str = ""
    stamps: list[float] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.chunks).decode(errors="replace")


@dataclass
class Result:
    """One request judged. Times in seconds; `sent_s` counts from the start of the run."""

    index: int
    kind: str = "unfinished"
    detail: str = ""
    retry_after: str = ""
    sent_s: float | None = None
    client_wait: float | None = None
    marks: list[float] = field(default_factory=list)  # arrivals of token frames, counted from the POST
    chunks: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str = ""

    @property
    def ttft(self) -> float | None:
        return self.marks[0] if self.marks else None

    @property
    def e2e(self) -> float | None:
        return self.marks[-1] if self.marks else None

    @property
    def tpot(self) -> float | None:
        if not self.marks or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.marks[-1] - self.marks[0]) / (self.output_tokens - 1)


# What is sent


def request_rng(args: argparse.Namespace, index: int) -> random.Random:
    """Request `index` is the same in every run with this seed, in whichever order requests are sent."""
    return random.Random(f"{args.seed}/{index}")


def make_prompt(args: argparse.Namespace, rng: random.Random) -> str | list[int]:
    if args.prompt is not None:
        return str(args.prompt)
    length = args.prompt_tokens.draw(rng)
    shared = min(args.shared_prefix, length)
    prefix_rng = random.Random(f"{args.seed}/prefix")
    if args.prompt_ids:
        ids = range(2, args.prompt_ids)  # 0 and 1 are often padding and end of text
        return [*prefix_rng.choices(ids, k=shared), *rng.choices(ids, k=length - shared)]
    return " ".join(prefix_rng.choices(WORDS, k=shared) + rng.choices(WORDS, k=length - shared))


def make_body(args: argparse.Namespace, rng: random.Random, index: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": args.max_tokens.draw(rng),
        "stream": True,
        "temperature": args.temperature,
        "seed": args.seed + index,
    }
    prompt = make_prompt(args, rng)
    if args.endpoint.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if not args.native:
        body["model"] = args.model
        body["stream_options"] = {"include_usage": True}
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body


def make_drop(fraction: float, rng: random.Random, max_tokens: int) -> Drop | None:
    """Half of the drops come within 0.1 s of the POST and no later than the first chunk, half in mid-stream.

    A reply that ends before its drop is due is an ordinary completed request.
    """
    if rng.random() >= fraction:
        return None
    if rng.random() < 0.5:
        return Drop(rng.uniform(0, DROP_DELAY_S), 1)
    # Spread evenly over orders of magnitude, so that replies with several tokens a chunk are hit before their end too.
    return Drop(math.inf, 1 + math.ceil(max_tokens ** rng.random()))


def arrivals(args: argparse.Namespace) -> Iterator[float]:
    """Due times in seconds. Gaps are gamma with shape --burstiness; --requests M are scaled to end at M / rate."""
    rng = random.Random(f"{args.seed}/arrivals")
    gaps = (rng.gammavariate(args.burstiness, 1 / (args.rate * args.burstiness)) for _ in itertools.count())
    if args.duration:
        yield from itertools.takewhile(lambda due: due < args.duration, itertools.accumulate(gaps))
        return
    times = list(itertools.accumulate(itertools.islice(gaps, args.requests)))
    yield from (due / times[-1] * args.requests / args.rate for due in times)


# What comes back


async def transfer(client: httpx.AsyncClient, request: httpx.Request, drop: Drop | None, timeout: float) -> Transfer:
    """Send one request and stamp each chunk; nothing is parsed here, so that stamps of other streams are not late."""
    wire = Transfer()
    limit = min(timeout, drop.delay) if drop else timeout
    last = drop.chunks if drop else 0

    async def trace(event: str, _: object) -> None:
        if event.endswith("send_request_body.complete"):
            wire.sent = perf_counter()
            clock.reschedule(asyncio.get_running_loop().time() + limit)

    request.extensions["trace"] = trace
    try:
        async with asyncio.timeout(timeout) as clock:
            response = await client.send(request, stream=True)
            wire.status, wire.retry_after = response.status_code, response.headers.get("retry-after", "")
            try:
                async for chunk in response.aiter_raw():
                    wire.stamps.append(perf_counter())
                    wire.chunks.append(chunk)
                    if len(wire.chunks) == last and wire.status == 200:
                        wire.fault = "aborted"
                        break
            finally:
                await response.aclose()
    except TimeoutError:
        ours = wire.sent and limit < timeout
        wire.fault, wire.detail = ("aborted", "") if ours else ("timeout", f"no end after {timeout:g} s")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        wire.fault, wire.detail = "connect_error", str(error) or type(error).__name__
    except httpx.HTTPError as error:
        wire.fault, wire.detail = "cut_stream" if wire.status else "no_reply", str(error) or type(error).__name__
    return wire


def payloads(stamps: Sequence[float], chunks: Sequence[bytes]) -> Iterator[tuple[float, bytes]]:
    """Each `data:` line with the arrival of the chunk that completed it. A line that was never completed is no frame.

    Servers of this kind put one JSON object on one line, so a line is taken for a frame; some leave out the blank line.
    """
    rest = b""
    for stamp, chunk in zip(stamps, chunks, strict=True):
        *lines, rest = LINE_END.split(rest + chunk)
        for line in lines:
            if line.startswith(b"data:"):
                yield stamp, line[5:].strip()


def content(frame: dict[str, Any]) -> tuple[str, bool, str]:
    """Text of a frame, whether it stands for a token, and its finish reason; for the native and both OpenAI forms."""
    if frame.get("type") == "token":
        return frame["text"], True, ""
    if frame.get("type") == "end":
        return "", False, str(frame["finish_reason"])
    if not frame.get("choices"):
        return "", False, ""
    choice = frame["choices"][0]
    part = choice.get("delta") or choice
    text = part.get("text") or part.get("content") or part.get("reasoning_content") or part.get("reasoning") or ""
    finish = choice.get("finish_reason") or ""
    return text, not finish, finish


def absorb(result: Result, at: float, frame: dict[str, Any]) -> None:
    usage = frame.get("usage") or {}
    if isinstance(tokens := usage.get("completion_tokens"), int):
        result.output_tokens = tokens
    if isinstance(tokens := usage.get("prompt_tokens"), int):
        result.prompt_tokens = tokens
    text, token, finish = content(frame)
    # An empty frame before the first text is a role or half a character that nobody can read yet; after it, a token.
    if text or (token and result.marks):
        result.marks.append(at)
    result.finish = finish or result.finish


async def judge_stream(result: Result, wire: Transfer) -> tuple[str, str]:
    """Read the frames into `result`; kind and detail. In slices, so that the other streams' stamps do not wait."""
    done, frames, payload = False, 0, b""
    try:
        for stamp, payload in payloads(wire.stamps, wire.chunks):
            frames += 1
            if frames % SLICE == 0:
                await asyncio.sleep(0)
            if payload == b"[DONE]":
                done = True
                continue
            frame = json.loads(payload)
            if frame.get("error"):
                return "error_frame", json.dumps(frame["error"])
            absorb(result, stamp - wire.sent, frame)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return "bad_frame", f"{error!r} in {payload!r}"
    if result.finish in BAD_FINISH:
        return f"finish_{result.finish}", "the server ended the stream with this reason"
    if result.finish or done:
        return "ok", ""
    if wire.chunks and not frames:
        return "not_a_stream", wire.text
    return "cut_stream", wire.detail or f"closed after {frames} frames without an end"


async def judge(result: Result, wire: Transfer) -> None:
    result.chunks, result.retry_after = len(wire.chunks), wire.retry_after
    if wire.fault in ("aborted", "timeout") or not wire.status:
        result.kind, result.detail = wire.fault, wire.detail
    elif wire.status != 200:
        result.kind, result.detail = f"http_{wire.status}", wire.text
    else:
        # A connection that broke after the end of the stream did no harm, so the frames decide.
        result.kind, result.detail = await judge_stream(result, wire)


# The run


def certificates(args: argparse.Namespace) -> ssl.SSLContext | bool:
    """What TLS trusts (SSL_CERT_FILE is honoured). Reading it takes 50 ms, so without TLS it is not read."""
    return httpx.create_ssl_context() if args.target.startswith("https") else False


class Load:
    """One run: the requests under way and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.verify = certificates(args)
        self.clients: list[httpx.AsyncClient] = []
        self.idle: list[httpx.AsyncClient] = []
        self.results: list[Result] = []
        self.kinds: Counter[str] = Counter()
        self.running = self.peak = self.output_tokens = 0
        self.interrupted = False
        self.started_at = datetime.now(UTC)
        self.start = self.end = perf_counter()
        self.cpu_start = self.cpu_end = time.process_time()

    def connect(self) -> httpx.AsyncClient:
        """One client for each request under way: with one for all, httpx walks all connections for each request.

        Idle connections are left before a server's own keep-alive (5 s in uvicorn) closes them.
        """
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if self.args.api_key:
            headers["Authorization"] = f"Bearer {self.args.api_key}"
        limits = httpx.Limits(keepalive_expiry=2.0)
        client = httpx.AsyncClient(limits=limits, timeout=None, headers=headers, trust_env=False, verify=self.verify)
        self.clients.append(client)
        return client

    async def one(self, index: int, due: float | None = None) -> None:
        due = perf_counter() if due is None else due
        rng = request_rng(self.args, index)
        body = make_body(self.args, rng, index)
        drop = make_drop(self.args.abort_fraction, rng, body["max_tokens"])
        client = self.idle.pop() if self.idle else self.connect()
        request = client.build_request("POST", self.args.target, json=body | self.args.extra)
        result = Result(index)
        self.results.append(result)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            wire = await transfer(client, request, drop, self.args.timeout)
        finally:
            self.running -= 1
            self.idle.append(client)
        if wire.sent:
            result.sent_s, result.client_wait = wire.sent - self.start, wire.sent - due
        await judge(result, wire)
        self.kinds[result.kind] += 1
        if result.kind == "ok":
            self.output_tokens += result.output_tokens or 0

    async def closed_loop(self) -> None:
        indices = itertools.count() if self.args.duration else iter(range(self.args.requests))

        async def client() -> None:
            for index in indices:
                if self.args.duration and perf_counter() - self.start >= self.args.duration:
                    return
                await self.one(index)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.args.concurrency):
                group.create_task(client())

    async def open_loop(self) -> None:
        cap = self.args.max_concurrency
        gate = asyncio.Semaphore(cap) if cap else contextlib.nullcontext()

        async def arrive(index: int, due: float) -> None:
            async with gate:
                await self.one(index, due)

        async with asyncio.TaskGroup() as group:
            for index, offset in enumerate(arrivals(self.args)):
                await asyncio.sleep(max(0.0, self.start + offset - perf_counter()))
                group.create_task(arrive(index, self.start + offset))

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()

    def status(self) -> str:
        failed = sum(count for kind, count in self.kinds.items() if kind not in NOT_FAILED)
        speed = self.output_tokens / (perf_counter() - self.start)
        ttft = percentile([result.ttft for result in self.results[-200:] if result.kind == "ok" and result.ttft], 50)
        return (
            f"{self.kinds.total()} done, {self.running} running, {failed} failed, {speed:.1f} tok/s"
            f"{f', TTFT {ttft * 1e3:.0f} ms' if ttft else ''}"
        )

    def share_done(self) -> float:
        if self.args.duration:
            return (perf_counter() - self.start) / float(self.args.duration)
        return self.kinds.total() / int(self.args.requests)


async def show_progress(load: Load, console: Console) -> None:
    """A bar on a terminal, else a line every five seconds; in the event loop, as a thread would delay more stamps."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(5)
            console.print(f"{perf_counter() - load.start:.0f} s: {load.status()}", highlight=False)
    columns = (BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        while True:
            progress.update(bar, completed=load.share_done(), description=load.status(), refresh=True)
            await asyncio.sleep(0.5)


async def load_modules() -> None:
    """The first request of a process imports modules (60 ms measured), so it goes to a socket of our own."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server, httpx.AsyncClient(trust_env=False, verify=False) as client:
        await client.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


async def warm_up(args: argparse.Namespace) -> None:
    if not args.warmup:
        return
    load = Load(argparse.Namespace(**vars(args) | {"abort_fraction": 0.0}))
    for index in range(args.warmup):
        await load.one(WARMUP_INDEX + index)
    await load.close()


async def run_load(args: argparse.Namespace, console: Console | None = None) -> Load:
    """Run the load that `args` describes; Ctrl-C ends it early. Progress goes to `console`, if there is one."""
    await load_modules()
    await warm_up(args)
    load = Load(args)
    show = asyncio.create_task(show_progress(load, console)) if console else None
    try:
        await (load.open_loop() if args.rate else load.closed_loop())
    except asyncio.CancelledError:
        load.interrupted = True
        if task := asyncio.current_task():
            task.uncancel()
    load.end, load.cpu_end = perf_counter(), time.process_time()
    if show:
        show.cancel()
        await asyncio.gather(show, return_exceptions=True)
    await load.close()
    return load


# Figures


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, linear between the two closest ranks as numpy has it by default; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Count, and in milliseconds mean, standard deviation, percentiles and maximum."""
    if not seconds:
        return {"count": 0}
    ms = sorted(value * 1e3 for value in seconds)
    mean = fmean(ms)
    std = math.sqrt(fmean((value - mean) ** 2 for value in ms))  # pstdev() takes seconds for a million gaps
    figures = {"mean": mean, "std": std, "median": percentile(ms, 50)}
    figures |= {f"p{q}": percentile(ms, q) for q in (90, 95, 99)} | {"max": ms[-1]}
    return {"count": len(ms)} | {name: round(value, 3) for name, value in figures.items() if value is not None}


def is_good(result: Result, goals: dict[str, float]) -> bool:
    """Whether a completed request met every limit; a figure that it does not have meets none."""
    tpot = 0.0 if result.output_tokens == 1 else result.tpot
    had = {"ttft": result.ttft, "tpot": tpot, "e2el": result.e2e}
    return all((value := had[name]) is not None and value * 1e3 <= limit for name, limit in goals.items())


def seconds_of(retry_after: str) -> float | None:
    try:
        return float(retry_after)
    except ValueError:
        return None


def failure_figures(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By kind, everything that did not end in order, with the detail of its first case."""
    out: dict[str, dict[str, Any]] = {}
    for kind in sorted({result.kind for result in results} - {"ok"}):
        those = [result for result in results if result.kind == kind]
        waits = [s for result in those if (s := seconds_of(result.retry_after)) is not None]
        example = "".join(c if c.isprintable() else " " for c in those[0].detail)[:300]
        out[kind] = {"count": len(those), "example": example}
        if waits:
            out[kind]["retry_after_s"] = {"count": len(waits), "min": min(waits), "max": max(waits)}
    return out


def latency_figures(load: Load, ok: Sequence[Result]) -> dict[str, dict[str, Any]]:
    return {
        "ttft": spread([r.ttft for r in ok if r.ttft is not None]),
        "tpot": spread([r.tpot for r in ok if r.tpot is not None]),
        "itl": spread([late - early for r in ok for early, late in itertools.pairwise(r.marks)]),
        "e2e": spread([r.e2e for r in ok if r.e2e is not None]),
        "client_wait": spread([r.client_wait for r in load.results if r.client_wait is not None]),
    }


def goodput_figures(load: Load, ok: Sequence[Result], judged: int, wall: float) -> dict[str, Any] | None:
    goals = load.args.goodput
    if not goals:
        return None
    good = sum(is_good(result, goals) for result in ok)
    attainment = round(good / judged, 4) if judged else None
    return {"limits_ms": goals, "good": good, "requests_per_s": round(good / wall, 4), "slo_attainment": attainment}


def summarise(load: Load) -> dict[str, Any]:
    """Everything that was measured, as plain JSON values."""
    results = load.results
    ok = [result for result in results if result.kind == "ok"]
    kinds = Counter(result.kind for result in results)
    judged = kinds.total() - kinds["aborted"] - kinds["unfinished"]
    wall = load.end - load.start
    tokens = token_figures(ok)
    config = {name: value for name, value in vars(load.args).items() if name != "api_key"}
    summary: dict[str, Any] = {
        "config": {name: value.spec if isinstance(value, Lengths) else value for name, value in config.items()},
        "started_at": load.started_at.isoformat(timespec="seconds"),
        "wall_s": round(wall, 3),
        "interrupted": load.interrupted,
        "requests": {
            "sent": len(results),
            "completed": len(ok),
            "failed": judged - len(ok),
            "aborted": kinds["aborted"],
            "unfinished": kinds["unfinished"],
            "peak_concurrency": load.peak,
        },
        "latency_ms": latency_figures(load, ok),
        "throughput": {
            "output_tokens_per_s": round(tokens["output"] / wall, 3),
            "total_tokens_per_s": round((tokens["output"] + tokens["prompt"]) / wall, 3),
            "requests_per_s": round(len(ok) / wall, 4),
        },
        "goodput": goodput_figures(load, ok, judged, wall),
        "tokens": tokens,
        "failures": failure_figures(results),
        "client_cpu_share": round((load.cpu_end - load.cpu_start) / wall, 3),
    }
    return summary | {"notes": notes(summary), "per_request": [record(result) for result in results]}


def token_figures(ok: Sequence[Result]) -> dict[str, int]:
    """Tokens by usage, and beside them what the wire showed: `counted_frames` are those of requests with usage."""
    return {
        "output": sum(r.output_tokens or 0 for r in ok),
        "prompt": sum(r.prompt_tokens or 0 for r in ok),
        "frames": sum(len(r.marks) for r in ok),
        "counted_frames": sum(len(r.marks) for r in ok if r.output_tokens is not None),
        "chunks": sum(r.chunks for r in ok),
        "requests_without_usage": sum(r.output_tokens is None for r in ok),
        "requests_without_text": sum(not r.marks for r in ok),
    }


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the figures."""
    out: list[str] = []
    tokens, completed, share = summary["tokens"], summary["requests"]["completed"], summary["client_cpu_share"]
    if share > BUSY:
        advice = "Run several of it, on another machine if possible."
        out.append(f"This client used {share:.0%} of a core: it may be the limit, not the server. {advice}")
    late = summary["latency_ms"]["client_wait"].get("median", 0.0)
    if late > LATE_MS and not summary["config"]["max_concurrency"]:
        out.append(f"Half of the requests went out over {late:.0f} ms late: this client or its machine cannot keep up.")
    if missing := tokens["requests_without_usage"]:
        out.append(f"{missing} of {completed} completed requests came without usage: their tokens are not counted.")
    if (frames := tokens["counted_frames"]) < (output := tokens["output"]):
        out.append(f"{output} tokens came in {frames} frames: ITL is the gap between frames, TPOT is per token.")
    if (chunks := tokens["chunks"]) < (frames := tokens["frames"]):
        out.append(f"{frames} frames came in {chunks} chunks: frames of one chunk have gap 0.")
    if silent := tokens["requests_without_text"]:
        out.append(f"{silent} of {completed} completed requests had no text at all: they have no TTFT, TPOT or E2E.")
    return out


def record(result: Result) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    return {
        "index": result.index,
        "kind": result.kind,
        "sent_ms": ms(result.sent_s),
        "client_wait_ms": ms(result.client_wait),
        "ttft_ms": ms(result.ttft),
        "tpot_ms": ms(result.tpot),
        "e2e_ms": ms(result.e2e),
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "frames": len(result.marks),
        "finish_reason": result.finish or None,
    }


def print_report(summary: dict[str, Any], console: Console) -> None:
    counts, rates, tokens = summary["requests"], summary["throughput"], summary["tokens"]
    peak = counts["peak_concurrency"]
    columns = ("mean", "median", "std", "p90", "p95", "p99", "max")
    table = Table(title="latency, ms", title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, figures in summary["latency_ms"].items():
        if figures["count"] or name != "client_wait":
            values = [figures.get(column) for column in columns]
            cells = ["-" if value is None else f"{value:.{1 if value < 1000 else 0}f}" for value in values]
            table.add_row("client wait" if name == "client_wait" else name.upper(), *cells)
    console.print(table)
    lines = [
        f"requests     {counts['sent']} sent, {counts['completed']} completed, {counts['failed']} failed, "
        f"{counts['aborted']} dropped by us, {counts['unfinished']} unfinished; peak concurrency {peak}",
        f"throughput   {rates['output_tokens_per_s']:.1f} output tokens/s, {rates['total_tokens_per_s']:.1f} total "
        f"tokens/s, {rates['requests_per_s']:.2f} requests/s over {summary['wall_s']:.1f} s",
        f"tokens       {tokens['prompt']} prompt, {tokens['output']} output (by usage)",
        f"client       {summary['client_cpu_share']:.0%} of a core",
    ]
    if goodput := summary["goodput"]:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in goodput["limits_ms"].items())
        share = "-" if goodput["slo_attainment"] is None else f"{goodput['slo_attainment']:.1%}"
        lines.append(f"goodput      {goodput['requests_per_s']:.2f} requests/s, SLO attainment {share} ({limits})")
    for kind, failure in summary["failures"].items():
        waits = failure.get("retry_after_s")
        after = f", Retry-After {waits['min']:g} to {waits['max']:g} s" if waits else ""
        example = f": {failure['example']}" if failure["example"] else ""
        lines.append(f"{kind:<12} {failure['count']}{after}{example}")
    lines += [f"NOTE         {note}" for note in summary["notes"]]
    lines += ["NOTE         Interrupted: these are the figures so far."] if summary["interrupted"] else []
    for line in lines:
        console.print(Text(line), soft_wrap=True)


# The command line


def at_least(low: float, kind: type[int] | type[float], above: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (above and value == low):
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}: want {noun} {'above' if above else 'of at least'} {low:g}")
        return value

    return parse


def goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(f"{text!r}: want NAME:MS with NAME one of {', '.join(GOALS)}")
    return name, at_least(0, float, above=True)(limit)


def text_in(encoding: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be sent: {error}") from None
        return text

    return parse


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: want a JSON object")
    return value


def is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and (url.port or 0) < 65536


def make_parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=raw, allow_abbrev=False)
    count, natural, positive = at_least(1, int), at_least(0, int), at_least(0, float, above=True)
    add = parser.add_argument_group("server").add_argument
    add("--url", required=True, help="where the server is, such as http://127.0.0.1:8000")
    add("--endpoint", default="/generate", help="path of the native or an OpenAI endpoint (%(default)s)")
    add("--model", type=text_in("utf-8"), help="OpenAI endpoints: the model's name; else the first one of /v1/models")
    add("--api-key", type=text_in("ascii"), help="sent as a bearer token")
    add("--timeout", type=positive, default=600.0, metavar="S", help="seconds for a whole request (%(default)g)")
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", type=count, metavar="N", help="closed loop: this many clients (8, if there is no --rate)")
    add("--rate", type=positive, metavar="R", help="open loop: this many requests a second")
    add("--burstiness", type=positive, metavar="K", help="with --rate: gamma shape of the gaps (1: Poisson)")
    add("--max-concurrency", type=count, metavar="N", help="with --rate: hold back what exceeds this many at once")
    add("--requests", type=count, metavar="M", help="stop after this many (64, if there is no --duration)")
    add("--duration", type=positive, metavar="S", help="send for this many seconds")
    add("--warmup", type=natural, default=0, metavar="M", help="requests sent one by one before the clock starts")
    add("--abort-fraction", type=at_least(0, float), default=0.0, metavar="F", help="share whose socket we close early")
    add = parser.add_argument_group("requests").add_argument
    add("--prompt-tokens", type=Lengths.parse, metavar="SPEC", help="words: 128, 32:256, lognormal:MU,SIGMA[,MAX]")
    add("--prompt-ids", type=at_least(3, int), metavar="VOCAB", help="exact lengths: send token ids from 2 to VOCAB-1")
    add("--prompt", type=text_in("utf-8"), metavar="TEXT", help="this prompt in every request")
    add("--shared-prefix", type=natural, default=0, metavar="N", help="all prompts start with the same N words or ids")
    add("--max-tokens", type=Lengths.parse, default="128", metavar="SPEC", help="likewise (both 128)")
    add("--ignore-eos", action="store_true", help="always generate max_tokens")
    add("--temperature", type=at_least(0, float), default=0.0, help="%(default)g")
    add("--seed", type=natural, default=0, help="of lengths, prompts, arrivals, drops; request i asks for seed + i (0)")
    add("--extra", type=json_object, default={}, metavar="JSON", help="object merged into every request body")
    add = parser.add_argument_group("report").add_argument
    add("--goodput", type=goal, nargs="+", default=[], metavar="NAME:MS", help=f"limits on {', '.join(GOALS)}")
    add("--json", metavar="FILE", help="write everything; -: to standard output, and the report to standard error")
    add("--quiet", action="store_true", help="no progress")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    text_prompt = args.prompt is not None
    conflicts = (
        (args.concurrency and args.rate, "--concurrency (closed loop) and --rate (open loop) exclude each other"),
        (args.requests and args.duration, "--requests and --duration exclude each other"),
        (args.max_concurrency and not args.rate, "--max-concurrency needs --rate"),
        (args.burstiness and not args.rate, "--burstiness needs --rate"),
        (text_prompt and args.prompt_tokens, "--prompt and --prompt-tokens exclude each other"),
        (text_prompt and args.prompt_ids, "--prompt and --prompt-ids exclude each other"),
        (text_prompt and args.shared_prefix, "--prompt and --shared-prefix exclude each other"),
        (args.abort_fraction > 1, f"--abort-fraction {args.abort_fraction:g}: want a share from 0 to 1"),
        (not args.endpoint.startswith("/"), f"--endpoint {args.endpoint!r}: want a path that starts with /"),
        (not is_url(args.url + args.endpoint), f"--url {args.url!r}: want http://HOST:PORT"),
        (args.json not in (None, "-") and not Path(args.json).parent.is_dir(), f"--json {args.json}: no such folder"),
    )
    for wrong, why in conflicts:
        if wrong:
            parser.error(why)
    args.native = args.endpoint.endswith("/generate")
    if not args.native and not args.endpoint.endswith("/completions"):
        parser.error(f"--endpoint {args.endpoint!r}: want one ending in /generate, /completions or /chat/completions")
    if args.native and args.model:
        parser.error("--model is for the OpenAI endpoints; the native one has no such field")
    if args.prompt_ids and args.endpoint.endswith("/chat/completions"):
        parser.error("--prompt-ids: chat takes text only")
    args.concurrency = args.concurrency or (None if args.rate else 8)
    args.requests = args.requests or (None if args.duration else 64)
    args.burstiness = args.burstiness or 1.0
    args.prompt_tokens = args.prompt_tokens or Lengths.parse("128")
    args.goodput = dict(args.goodput)
    args.target = args.url.rstrip("/") + args.endpoint
    return args


def first_model(args: argparse.Namespace) -> str:
    """The first name that /v1/models gives; LookupError when it gives none."""
    url = re.sub(r"(/chat)?/completions$", "/models", args.target)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        reply = httpx.get(url, headers=headers, trust_env=False, verify=certificates(args), timeout=30.0)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise LookupError(f"no model name from {url} ({error}); give it with --model") from None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    errors = Console(stderr=True)
    try:
        args.model = args.model or (None if args.native else first_model(args))
        load = asyncio.run(run_load(args, None if args.quiet else errors))
    except KeyboardInterrupt:
        return 130  # before the first request; later ones end the run in order
    except LookupError as error:
        errors.print(Text(f"load_test: {error}"), soft_wrap=True)
        return 1
    summary = summarise(load)
    print_report(summary, errors if args.json == "-" else Console())
    if args.json == "-":
        print(json.dumps(summary))
    elif args.json:
        Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    if load.interrupted:
        return 130
    return 1 if summary["requests"]["failed"] and not summary["requests"]["completed"] else 0


if __name__ == "__main__":
    sys.exit(main())
