"""The loop every simulated server runs in, and the figures it collects."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from simulation.jobs import Job

from tokenteller.model.kv_memory import KVLayout


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: limits of the server, and how long a step takes."""

    layout: KVLayout
    pool_bytes: int
    slots: int = 64
    queue: int = 64  # requests that wait at once
    chunk: int = 192  # prompt rows per step
    step_s: float = 1.0
    row_s: float = 0.0

    def seconds(self, rows: int) -> float:
        return self.step_s + self.row_s * rows


@dataclass(slots=True)
class Figures:
    """Sums over one run. The arrays stay small even for millions of requests."""

    steps: int = 0
    time: float = 0.0  # seconds of simulated time
    tokens: int = 0
    running: int = 0  # sequences, summed over the steps
    held_bytes: int = 0  # likewise
    stalled: int = 0  # steps that running sequences had to sit out
    rejected: int = 0  # requests that could never fit
    evicted: int = 0
    late: int = 0  # requests that started after their reported latest start
    queued: array[float] = field(default_factory=lambda: array("d"))  # seconds in the queue, one per request
    wait_ratios: array[float] = field(default_factory=lambda: array("d"))  # steps waited / steps reported at most
    cpu_s: float = 0.0


class Server(Protocol):
    figures: Figures

    def queue_length(self) -> int: ...

    def busy(self) -> bool:
        """Whether anything waits or runs."""

    def submit(self, job: Job) -> None: ...

    def step(self) -> None: ...


def run(server: Server, jobs: Iterator[Job], machine: Machine) -> Figures:
    """Feeds the jobs to the server, each at its arrival or as soon as the queue has room, until all are done."""
    figures, began = server.figures, time.process_time()
    fitting = _that_fit(jobs, machine, figures)
    job = next(fitting, None)
    while job or server.busy():
        while job and job.arrival <= figures.time and server.queue_length() < machine.queue:
            server.submit(job)
            job = next(fitting, None)
        if job and not server.busy():
            figures.time = job.arrival
            continue
        server.step()
    figures.cpu_s = time.process_time() - began
    return figures


def _that_fit(jobs: Iterator[Job], machine: Machine, figures: Figures) -> Iterator[Job]:
    """Drops and counts the jobs that a server would reject, as neither context nor pool can ever hold them."""
    most = machine.layout.tokens_that_fit(machine.pool_bytes)
    for job in jobs:
        if job.prompt + job.max_tokens <= most:
            yield job
        else:
            figures.rejected += 1
