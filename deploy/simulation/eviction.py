"""A model of servers that overcommit the pool and evict, to compare with."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from simulation.jobs import Job
from simulation.loop import Figures, Machine

WATERMARK = 0.01  # share of the pool that an admission leaves free, as vLLM does by default


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
