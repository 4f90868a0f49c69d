"""The real scheduler and ledger on a trace, with a runner that computes nothing: what a rule of admission is worth.

    python deploy/simulate.py                                    the five mixes under every rule
    python deploy/simulate.py --mix full --rule peak --requests 100000
    python deploy/simulate.py --trace requests.csv               columns: arrival, prompt, max_tokens, output

A step takes --step-ms (1 s by default, so that time is steps) and --row-us for each of its rows. Requests of a mix
arrive as fast as the queue takes them (--queue), those of a trace at their time in seconds. `optimistic` and `restart`
are models of servers that admit what fits now and evict the youngest when the pool is full: its rows are computed
again, or it begins anew from its prompt.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.sampler import Sampled, SamplingParams
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Finished, Request, Started, Step

GREEDY = SamplingParams(temperature=0.0)
GO_ON, END = Sampled(0), Sampled(1)
COLUMNS = ("arrival", "prompt", "max_tokens", "output")
RULES = ("reserve", "peak", "learned", "optimistic", "restart")


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace: when it comes, its prompt, what it asks for, and what it really uses, in tokens."""

    arrival: float
    prompt: int
    max_tokens: int
    output: int


# The five mixes: `output` tokens are what clients use, `max_tokens` what they ask for.


def _prompt(rng: random.Random) -> int:
    return max(1, min(1500, int(rng.lognormvariate(5, 0.8))))


def _answer(rng: random.Random, most: int, sigma: float = 0.7) -> int:
    return min(most, max(1, int(rng.lognormvariate(4.8, sigma))))


def tight(rng: random.Random) -> tuple[int, int, int]:
    """Clients ask for about what they use: half of them exactly, half for up to three times as much."""
    prompt, output = _prompt(rng), _answer(rng, 1024)
    exact = rng.random() < 0.5
    return prompt, output if exact else min(1024, int(output * rng.uniform(1, 3)) + 1), output


def default(rng: random.Random) -> tuple[int, int, int]:
    """Everyone asks for 512 and uses about 120."""
    return _prompt(rng), 512, _answer(rng, 512)


def mixed(rng: random.Random) -> tuple[int, int, int]:
    """max_tokens is one of 64 to 1,024; about 120 are used, cut at max_tokens."""
    prompt, asked = _prompt(rng), rng.choice([64, 128, 256, 512, 1024])
    return prompt, asked, _answer(rng, asked, 0.9)


def full(rng: random.Random) -> tuple[int, int, int]:
    """As mixed, but everyone uses all of max_tokens."""
    prompt, asked, _ = mixed(rng)
    return prompt, asked, asked


def bimodal(rng: random.Random) -> tuple[int, int, int]:
    """Short prompts, everyone asks for 1,024; three in ten use it all, the others 5 to 200."""
    prompt = max(1, min(300, int(rng.lognormvariate(3.5, 0.6))))
    return prompt, 1024, 1024 if rng.random() < 0.3 else rng.randint(5, 200)


MIXES = {mix.__name__: mix for mix in (tight, default, mixed, full, bimodal)}


def mix_jobs(mix: str, requests: int, seed: int) -> Iterator[Job]:
    rng = random.Random(seed)
    for _ in range(requests):
        yield Job(0.0, *MIXES[mix](rng))


class TraceError(Exception):
    """A trace that cannot be read; with the line."""


def trace_jobs(path: str) -> Iterator[Job]:
    """Raises TraceError."""
    line, before = 1, 0.0
    try:
        with open(path, newline="") as file:
            rows = csv.DictReader(file, restval="")
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                raise ValueError(f"want the columns {', '.join(COLUMNS)}")
            for row in rows:
                line = rows.line_num
                job = Job(float(row["arrival"]), *(int(row[name]) for name in COLUMNS[1:]))
                if not before <= job.arrival < math.inf:
                    raise ValueError(f"arrival {job.arrival:g} is before {before:g} or no time")
                if job.prompt < 1 or not 1 <= job.output <= job.max_tokens:
                    raise ValueError("want a prompt of at least 1 and an output of 1 to max_tokens")
                before = job.arrival
                yield job
        if line == 1:
            raise ValueError("no request")
    except (OSError, ValueError, csv.Error) as error:
        raise TraceError(f"{path}, line {line}: {error}") from None


@dataclass(slots=True)
class Figures:
    """What a run was like. Queue times are in units of time, gaps in steps."""

    steps: int = 0
    time: float = 0.0
    tokens: int = 0
    running: int = 0  # summed over the steps
    held_bytes: int = 0  # summed over the steps
    held_steps: int = 0  # steps that a running sequence had to sit out
    refused: int = 0  # can never fit, as a server would say at once
    evicted: int = 0
    late: int = 0  # started later than told
    queued: array[float] = field(default_factory=lambda: array("d"))  # small even for millions
    told: array[float] = field(default_factory=lambda: array("d"))  # real wait / told wait, of those that had to wait
    cpu_s: float = 0.0


def that_fit(jobs: Iterator[Job], layout: KVLayout, pool_bytes: int, figures: Figures) -> Iterator[Job]:
    """Leaves out and counts the jobs that neither the context nor the pool could ever hold."""
    most = layout.tokens_that_fit(pool_bytes)
    for job in jobs:
        if job.prompt + job.max_tokens <= most:
            yield job
        else:
            figures.refused += 1


class Simulation:
    """A scheduler under one rule, fed with jobs."""

    def __init__(self, options: argparse.Namespace, rule: str, layout: KVLayout, pool_bytes: int) -> None:
        self.options = options
        ledger = KVLedger(layout, options.slots, pool_bytes, rule, options.chunk)
        self.scheduler = Scheduler(ledger, options.chunk, bypass_limit=options.bypass_limit)
        self.ends: dict[str, int] = {}  # rows after which a request ends by itself; 0 where it is cut
        self.figures = Figures()
        self._told: dict[str, tuple[float, int, int]] = {}

    def run(self, jobs: Iterator[Job]) -> Figures:
        began = time.process_time()
        job = next(jobs, None)
        while job or self.ends:
            while job and job.arrival <= self.figures.time and len(self.scheduler.waiting) < self.options.queue:
                self._submit(job)
                job = next(jobs, None)
            if not self.ends and job:
                self.figures.time = job.arrival
                continue
            self._step()
        self.figures.cpu_s = time.process_time() - began
        return self.figures

    def _submit(self, job: Job) -> None:
        scheduler, now = self.scheduler, self.figures.time
        serial = str(len(self.figures.queued) + len(self._told))
        self.ends[serial] = job.prompt + job.output - 1 if job.output < job.max_tokens else 0
        request = Request(serial, (0,) * job.prompt, job.max_tokens, GREEDY, frozenset({1}), cache_prefix=False)
        scheduler.submit(request, now)
        plan = scheduler.waiting[-1].plan
        clock = scheduler.ledger.timetable.now
        self._told[serial] = (now, clock, plan.begin if plan else clock + KVLedger.HORIZON)

    def _step(self) -> None:
        figures, scheduler = self.figures, self.scheduler
        step = scheduler.plan(figures.time)
        for event in step.events:
            if isinstance(event, Started):
                came, clock, told = self._told.pop(event.request_id)
                figures.queued.append(figures.time - came)
                waited = scheduler.ledger.timetable.now - clock
                figures.late += waited > told - clock
                if told > clock:
                    figures.told.append(waited / (told - clock))
        figures.time += (self.options.step_ms + self.options.row_us * step.rows / 1000) / 1000
        outcomes, running = self._outcomes(step), len(scheduler.running)
        events = scheduler.commit(step, outcomes, figures.time)
        if len(scheduler.running) < running:
            for event in events:
                if isinstance(event, Finished):
                    del self.ends[event.request_id]
        figures.steps += bool(step.spans)
        figures.tokens += len(outcomes)
        figures.running += len(scheduler.running)
        figures.held_bytes += scheduler.ledger.lent_bytes
        figures.held_steps = scheduler.counts.held_steps

    def _outcomes(self, step: Step) -> list[Sampled]:
        outcomes, ends = [], self.ends
        for span in step.spans:
            request = span.sequence.request
            if span.stop >= len(request.prompt):
                outcomes.append(END if span.stop == ends[request.id] else GO_ON)
        return outcomes


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of the optimistic model: `rows` of `known` tokens are computed, `held` bytes are its own."""

    job: Job
    came: float
    known: int
    rows: int = 0
    held: int = 0
    started: bool = False


class Optimistic:
    """Admits the head of the queue when its prompt fits now and 1 % of the pool stays free, as vLLM does by default.

    When a sequence that grows finds no page, the youngest is evicted: it goes back to the head of the queue, and its
    prompt and the text made so far are computed again, or without `keeps_text` its prompt, and the text is made anew,
    a token a step. A step has chunk + slots rows: those that decode come first, prompts and what is computed again
    share the rest. Nobody is admitted in a step that evicted.
    """

    WATERMARK = 0.01

    def __init__(self, options: argparse.Namespace, layout: KVLayout, pool_bytes: int, keeps_text: bool) -> None:
        self.options = options
        self.keeps_text = keeps_text
        self.cost = [layout.committed(rows) for rows in range(layout.max_context + 1)]
        self.free, self.reserve = pool_bytes, int(self.WATERMARK * pool_bytes)
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []  # oldest first
        self.figures = Figures()

    def run(self, jobs: Iterator[Job]) -> Figures:
        figures, began, pool_bytes = self.figures, time.process_time(), self.free
        job = next(jobs, None)
        while job or self.waiting or self.running:
            while job and job.arrival <= figures.time and len(self.waiting) < self.options.queue:
                self.waiting.append(_Sequence(job, figures.time, job.prompt))
                job = next(jobs, None)
            if job and not self.waiting and not self.running:
                figures.time = job.arrival
                continue
            rows = self._step()
            figures.steps += 1
            figures.time += (self.options.step_ms + self.options.row_us * rows / 1000) / 1000
            figures.running += len(self.running)
            figures.held_bytes += pool_bytes - self.free
        figures.cpu_s = time.process_time() - began
        return figures

    def _step(self) -> int:
        """One step. Returns the rows computed."""
        rows, evicted = self.options.chunk + self.options.slots, self.figures.evicted
        budget = rows
        for sequence in self.running.copy():
            if sequence.known - sequence.rows == 1 and self._make_room(sequence):
                budget -= self._compute(sequence, 1)
        for sequence in self.running.copy():
            if sequence.known - sequence.rows > 1:
                budget -= self._compute(sequence, min(budget, sequence.known - sequence.rows))
        while self.waiting and budget and len(self.running) < self.options.slots and self.figures.evicted == evicted:
            sequence = self.waiting[0]
            needed = self.cost[sequence.known]
            if self.running and needed + self.reserve > self.free:
                break
            self.waiting.popleft()
            if not sequence.started:
                sequence.started = True
                self.figures.queued.append(self.figures.time - sequence.came)
            self.free -= needed
            sequence.held = needed
            self.running.append(sequence)
            budget -= self._compute(sequence, min(budget, sequence.known))
        self._end()
        return rows - budget

    def _make_room(self, sequence: _Sequence) -> bool:
        """Takes the bytes of one more row; whether the sequence is still there after the evictions that needs."""
        while sequence in self.running:
            growth = max(0, self.cost[sequence.rows + 1] - sequence.held)
            if growth <= self.free:
                self.free -= growth
                sequence.held += growth
                return True
            victim = self.running.pop()
            self.free += victim.held
            victim.held = victim.rows = 0
            if not self.keeps_text:
                victim.known = victim.job.prompt
            self.waiting.appendleft(victim)
            self.figures.evicted += 1
        return False

    def _compute(self, sequence: _Sequence, rows: int) -> int:
        sequence.rows += rows
        sequence.known += sequence.rows == sequence.known
        return rows

    def _end(self) -> None:
        """What the step brought to its end is free for the next."""
        for sequence in self.running.copy():
            if sequence.known - sequence.job.prompt >= sequence.job.output:
                self.running.remove(sequence)
                self.free += sequence.held
                self.figures.tokens += sequence.job.output


LEAST = {
    "requests": 1,
    "queue": 1,
    "slots": 1,
    "pool_rows": 16,
    "max_context": 2,
    "chunk": 1,
    "bypass_limit": 0,
    "step_ms": 0,
    "row_us": 0,
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=MIXES, nargs="+", default=list(MIXES))
    parser.add_argument("--trace", help="a CSV file in place of the mixes")
    parser.add_argument("--rule", choices=RULES, nargs="+", default=list(RULES))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queue", type=int, default=64, help="requests that wait at once")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--pool-rows", type=int, default=16384)
    parser.add_argument("--max-context", type=int, default=2600)
    parser.add_argument("--chunk", type=int, default=192, help="rows of prompts a step")
    parser.add_argument("--bypass-limit", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=1000.0)
    parser.add_argument("--row-us", type=float, default=0.0)
    options = parser.parse_args(argv)
    for name, least in LEAST.items():
        value = getattr(options, name)
        if not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value:g}: want at least {least}")
    return options


HEAD = (
    "mix",
    "rule",
    "at once",
    "pool used",
    "steps",
    "held %",
    "refused",
    "evicted",
    "late",
    "told p50",
    "p90",
    "time",
    "queue p50",
    "p99",
    "req/s",
    "tokens/s",
)


def row(name: str, rule: str, figures: Figures, pool_bytes: int, requests: int) -> tuple[str, ...]:
    queued, told = sorted(figures.queued), sorted(figures.told)
    return (
        name,
        rule,
        f"{figures.running / max(1, figures.steps):.1f}",
        f"{figures.held_bytes / max(1, figures.steps) / pool_bytes:.2f}",
        f"{figures.steps:,}",
        f"{100 * figures.held_steps / max(1, figures.running):.3f}",
        f"{figures.refused:,}",
        f"{figures.evicted:,}",
        f"{figures.late}",
        *(f"{told[len(told) * percent // 100]:.2f}" if told else "" for percent in (50, 90)),
        f"{figures.time:,.0f}",
        *(f"{queued[len(queued) * percent // 100]:,.0f}" if queued else "" for percent in (50, 99)),
        *(f"{count / max(figures.cpu_s, 1e-9):,.0f}" for count in (requests, figures.tokens)),
    )


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    try:
        simulate(options)
    except TraceError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def simulate(options: argparse.Namespace) -> None:
    layout = KVLayout(1, 1, 64, options.max_context)  # one layer, one head: a page holds 16 rows
    pool_bytes = layout.committed(16) * options.pool_rows // 16
    table: list[tuple[str, ...]] = [HEAD]  # printed with its first row, for the trace may be wrong
    for name in [options.trace] if options.trace else options.mix:
        for rule in options.rule:
            jobs = trace_jobs(name) if options.trace else mix_jobs(name, options.requests, options.seed)
            if rule in ("optimistic", "restart"):
                server: Optimistic | Simulation = Optimistic(options, layout, pool_bytes, rule == "optimistic")
            else:
                server = Simulation(options, rule, layout, pool_bytes)
            figures = server.run(that_fit(jobs, layout, pool_bytes, server.figures))
            table.append(row(Path(name).name, rule, figures, pool_bytes, len(figures.queued)))
            while table:
                print("".join(f"{cell:>12}" for cell in table.pop(0)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
