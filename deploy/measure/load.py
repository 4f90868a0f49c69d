"""Runs the load: a closed loop of clients or an open loop of arrivals."""

from __future__ import annotations

import asyncio
import itertools
import time
from argparse import Namespace
from datetime import UTC, datetime
from time import perf_counter

import httpx
import numpy as np
from measure.result import Result, judge
from measure.transfer import connect, transfer
from measure.workload import arrivals, make_body
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

WARMUP_INDEX = 1 << 30  # measured requests have other prompts, which no prefix cache has seen


class Load:
    """One run and its results so far."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.results: list[Result] = []
        self.running = self.peak = 0
        self.interrupted = False
        self.started_at = datetime.now(UTC)
        self.start = self.end = perf_counter()
        self.cpu_start = self.cpu_end = time.process_time()

    async def one(self, client: httpx.AsyncClient, index: int, due: float | None = None) -> None:
        """Sends one request. `due` is when it should have been sent, by default now."""
        due = perf_counter() if due is None else due
        request = client.build_request("POST", self.options.target, json=make_body(self.options, index))
        result = Result(index)
        self.results.append(result)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            wire = await transfer(client, request, self.options.timeout)
        finally:
            self.running -= 1
        if wire.sent:
            result.sent_s, result.client_wait = wire.sent - self.start, wire.sent - due
        await judge(result, wire)

    async def closed_loop(self, http: httpx.AsyncClient) -> None:
        duration = self.options.duration
        indices = itertools.count() if duration else iter(range(self.options.requests))

        async def client() -> None:
            for index in indices:
                if duration and perf_counter() - self.start >= duration:
                    return
                await self.one(http, index)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.options.concurrency):
                group.create_task(client())

    async def open_loop(self, http: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            for index, offset in enumerate(arrivals(self.options)):
                await asyncio.sleep(max(0.0, self.start + offset - perf_counter()))
                group.create_task(self.one(http, index, self.start + offset))


async def run_load(options: Namespace, console: Console | None = None) -> Load:
    """Runs the load. Ctrl-C ends it early. `console`: a terminal to show progress on."""
    async with connect(options) as http:
        warm_up = Load(options)
        for index in range(options.warmup):
            await warm_up.one(http, WARMUP_INDEX + index)
        load = Load(options)
        progress = asyncio.create_task(_show_progress(load, console)) if console else None
        try:
            await (load.open_loop(http) if options.rate else load.closed_loop(http))
        except asyncio.CancelledError:
            load.interrupted = True
            if task := asyncio.current_task():
                task.uncancel()
        load.end, load.cpu_end = perf_counter(), time.process_time()
        if progress:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
    return load


async def _show_progress(load: Load, console: Console) -> None:
    """In the event loop, as a thread would delay more stamps."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        line = progress.add_task("")
        while True:
            progress.update(line, description=_status(load), refresh=True)
            await asyncio.sleep(0.5)


def _status(load: Load) -> str:
    ended = [r for r in load.results if r.kind != "unfinished"]
    speed = sum(r.output_tokens or 0 for r in ended if r.kind == "ok") / (perf_counter() - load.start)
    recent = [r.ttft for r in ended[-200:] if r.kind == "ok" and r.ttft]
    ttft = f", TTFT {np.median(recent) * 1e3:.0f} ms" if recent else ""
    of = f" of {load.options.requests}" if load.options.requests else ""
    failed = sum(r.failed for r in ended)
    return f"{len(ended)}{of} done, {load.running} running, {failed} failed, {speed:.1f} tok/s{ttft}"
