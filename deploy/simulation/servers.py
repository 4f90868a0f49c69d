"""Simulated servers: the real scheduler and ledger without a model, and a model of servers that evict."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from simulation.jobs import Job

from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.sampler import Sampled, SamplingParams
from tokenteller.server.engine.admission import Admission, Rule
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Finished, Request, Started, Step

GREEDY = SamplingParams(temperature=0.0)
GO_ON, END = Sampled(0), Sampled(1)
END_IDS = frozenset({1})
WATERMARK = 0.01  # share of the pool that an evicting server leaves free when it admits, as vLLM does by default


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


class RealScheduler:
    """Plans and commits steps as the engine thread does. Tokens come from the job and not from a decoder."""

    def __init__(self, machine: Machine, rule: Rule) -> None:
        self.machine = machine
        ledger = KVLedger(machine.layout, machine.slots, machine.pool_bytes)
        self.scheduler = Scheduler(Admission(ledger, rule, machine.chunk), machine.chunk)
        self.figures = Figures()
        self._ends: dict[str, int] = {}  # rows after which a request samples its end token; 0: max_tokens ends it
        self._waiting: dict[str, tuple[float, int, int]] = {}  # arrival in seconds; in steps arrival and latest start

    def queue_length(self) -> int:
        return len(self.scheduler.waiting)

    def busy(self) -> bool:
        return bool(self._ends)

    def submit(self, job: Job) -> None:
        scheduler, now = self.scheduler, self.figures.time
        serial = str(len(self.figures.queued) + len(self._waiting))
        self._ends[serial] = job.prompt + job.output - 1 if job.output < job.max_tokens else 0
        scheduler.submit(Request(serial, (0,) * job.prompt, job.max_tokens, GREEDY, END_IDS, cache_prefix=False), now)
        reservation = scheduler.waiting[-1].reservation
        clock = scheduler.timeline.now
        self._waiting[serial] = (now, clock, reservation.begin if reservation else clock + Admission.HORIZON)

    def step(self) -> None:
        figures, scheduler = self.figures, self.scheduler
        step = scheduler.plan(figures.time)
        for event in step.events:
            if isinstance(event, Started):
                self._started(event.request_id)
        figures.time += self.machine.seconds(step.rows)
        outcomes, running = self._outcomes(step), len(scheduler.running)
        events = scheduler.commit(step, outcomes, figures.time)
        if len(scheduler.running) < running:
            for event in events:
                if isinstance(event, Finished):
                    del self._ends[event.request_id]
        figures.steps += bool(step.spans)
        figures.tokens += len(outcomes)
        figures.running += len(scheduler.running)
        figures.held_bytes += scheduler.ledger.allocated_bytes
        figures.stalled = scheduler.counts.stalled_steps

    def _started(self, request_id: str) -> None:
        arrival, clock, latest = self._waiting.pop(request_id)
        self.figures.queued.append(self.figures.time - arrival)
        waited = self.scheduler.timeline.now - clock
        self.figures.late += waited > latest - clock
        if latest > clock:
            self.figures.wait_ratios.append(waited / (latest - clock))

    def _outcomes(self, step: Step) -> list[Sampled]:
        outcomes, ends = [], self._ends
        for span in step.spans:
            request = span.sequence.request
            if span.stop >= len(request.prompt):
                outcomes.append(END if span.stop == ends[request.id] else GO_ON)
        return outcomes


@dataclass(slots=True, eq=False)
class _Sequence:
    """`rows` of `known` tokens are computed, in `held` bytes."""

    job: Job
    arrival: float
    known: int
    rows: int = 0
    held: int = 0
    started: bool = False


class EvictingServer:
    """Admits the head of the queue when its prompt fits now and the watermark stays free.

    When a sequence cannot grow, the youngest is evicted to the head of the queue. Its prompt and text are computed
    again; without `keeps_text` only its prompt is, and the text is generated anew. A step has chunk + slots rows:
    decodes come first, prompts and recomputation share the rest. A step that evicted admits nobody.
    """

    def __init__(self, machine: Machine, keeps_text: bool) -> None:
        self.machine = machine
        self.keeps_text = keeps_text
        self.cost = [machine.layout.committed(rows) for rows in range(machine.layout.max_context + 1)]
        self.free, self.watermark = machine.pool_bytes, int(WATERMARK * machine.pool_bytes)
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []  # oldest first
        self.figures = Figures()

    def queue_length(self) -> int:
        return len(self.waiting)

    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, job: Job) -> None:
        self.waiting.append(_Sequence(job, self.figures.time, job.prompt))

    def step(self) -> None:
        figures, evicted = self.figures, self.figures.evicted
        rows = budget = self.machine.chunk + self.machine.slots
        for sequence in self.running.copy():
            if sequence.known - sequence.rows == 1 and self._grow(sequence):
                budget -= self._compute(sequence, 1)
        for sequence in self.running.copy():
            if sequence.known - sequence.rows > 1:
                budget -= self._compute(sequence, min(budget, sequence.known - sequence.rows))
        if figures.evicted == evicted:
            budget = self._admit(budget)
        self._finish()
        figures.steps += 1
        figures.time += self.machine.seconds(rows - budget)
        figures.running += len(self.running)
        figures.held_bytes += self.machine.pool_bytes - self.free

    def _grow(self, sequence: _Sequence) -> bool:
        """Takes the bytes of one more row. False if the sequence itself had to be evicted for it."""
        while sequence in self.running:
            growth = max(0, self.cost[sequence.rows + 1] - sequence.held)
            if growth <= self.free:
                self.free -= growth
                sequence.held += growth
                return True
            self._evict(self.running.pop())
        return False

    def _evict(self, victim: _Sequence) -> None:
        self.free += victim.held
        victim.held = victim.rows = 0
        if not self.keeps_text:
            victim.known = victim.job.prompt
        self.waiting.appendleft(victim)
        self.figures.evicted += 1

    def _admit(self, budget: int) -> int:
        """Starts what fits. Returns the rows left."""
        while self.waiting and budget and len(self.running) < self.machine.slots:
            sequence = self.waiting[0]
            needed = self.cost[sequence.known]
            if self.running and needed + self.watermark > self.free:
                break
            self.waiting.popleft()
            if not sequence.started:
                sequence.started = True
                self.figures.queued.append(self.figures.time - sequence.arrival)
            self.free -= needed
            sequence.held = needed
            self.running.append(sequence)
            budget -= self._compute(sequence, min(budget, sequence.known))
        return budget

    def _compute(self, sequence: _Sequence, rows: int) -> int:
        sequence.rows += rows
        sequence.known += sequence.rows == sequence.known
        return rows

    def _finish(self) -> None:
        for sequence in self.running.copy():
            if sequence.known - sequence.job.prompt >= sequence.job.output:
                self.running.remove(sequence)
                self.free += sequence.held
                self.figures.tokens += sequence.job.output
