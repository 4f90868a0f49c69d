"""The real scheduler and ledger, driven without a model."""

from __future__ import annotations

from simulation.jobs import Job
from simulation.loop import Figures, Machine

from tokenteller.model.sampler import Sampled, SamplingParams
from tokenteller.server.engine.admission import Admission, Rule
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Finished, Request, Started, Step

GREEDY = SamplingParams(temperature=0.0)
GO_ON, END = Sampled(0), Sampled(1)
END_IDS = frozenset({1})


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
