"""The engine thread: drains its inbox, plans, runs, commits, and delivers the events once per step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tokenteller.server.engine.heartbeat import Heartbeat, StepDeadline
from tokenteller.server.engine.runner import Runner, use_threads
from tokenteller.server.engine.scheduler import Scheduler
from tokenteller.server.engine.sequence import Event, Request
from tokenteller.server.engine.waiting import next_start_s
from tokenteller.server.metrics import Metrics

log = logging.getLogger("tokenteller.engine")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Status:
    """The engine's state after its last step; replaced whole, so any thread may read it."""

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    blocked_by: str | None = None  # what keeps the head of the queue out
    step_seconds: float = 0.0  # estimate for a step like the last one
    next_start_s: float = 0.0  # until the next waiting sequence starts, at the latest


class Engine:
    """Runs the scheduler and the runner on a thread of its own.

    `deliver` is called there with the events of each step, and `ended` once, with the reason why no more will come.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Callable[[list[Event]], None],
        ended: Callable[[str], None],
        one_row_s: float = 0.01,
        metrics: Metrics | None = None,
    ) -> None:
        self.scheduler = scheduler
        scheduler.cost.observe(1, one_row_s)  # so that the first request has an estimate too
        self.runner = runner
        self.deliver = deliver
        self.ended = ended
        self.metrics = metrics or Metrics()
        self.status = Status(free_slots=scheduler.ledger.free_slots)
        self.failure: BaseException | None = None
        self.heartbeat: Heartbeat | None = None  # None while it waits for work; any thread may read it
        self._round = 0
        self._deadline = StepDeadline(one_row_s)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._guarded, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; what still runs has failed. Waits at most 2 s, as it may be stuck."""

        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout=2)

    @property
    def running(self) -> bool:
        """Whether its thread exists."""
        return self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def submit(self, request: Request) -> None:
        self._inbox.put(lambda: self.scheduler.submit(request, time.monotonic()))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        asked = time.monotonic()

        def cancel() -> None:
            running = len(self.scheduler.running)
            self.scheduler.cancel(request_id, index)
            if len(self.scheduler.running) < running:
                self.metrics.freed(time.monotonic() - asked)

        self._inbox.put(cancel)

    def hold(self, request_id: str, held: bool) -> None:
        self._inbox.put(lambda: self.scheduler.hold(request_id, held))

    def ask(self, question: Callable[[Scheduler, Runner], T]) -> Future[T]:
        """Answers a question about the engine's state, between two steps on its own thread, with no move pending."""
        answer: Future[T] = Future()

        def put() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller has given up
            self.runner.move(self.scheduler.take_moves())
            try:
                answer.set_result(question(self.scheduler, self.runner))
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(put)
        return answer

    def _guarded(self) -> None:
        use_threads(self.runner.threads)
        try:
            self._loop()
            self.ended("the server is shutting down")
        except BaseException as error:
            log.exception("the engine died")
            self.failure = error
            self.ended(f"the engine died of {type(error).__name__}")

    def _loop(self) -> None:
        idle = True
        while True:
            self._drain(block=idle)
            if self._stopping:
                return
            step = self.scheduler.plan(time.monotonic())
            self._beat(self._deadline.of(step.rows))
            self._post(step.events)
            began = time.monotonic()
            outcomes = self.runner.run(step)
            self._post(self.scheduler.commit(step, outcomes, time.monotonic()))
            idle = not step.spans
            seconds = time.monotonic() - began
            if not idle:
                self._deadline.learn(step.rows, seconds)
                self.metrics.step(step.rows, seconds)
            self._publish(step.rows)

    def _drain(self, block: bool) -> None:
        """Carries out what has arrived. With nothing to compute, waits for the first arrival or the next expiry."""
        if block:
            self.heartbeat = None
            expiry = self.scheduler.next_expiry()
            with suppress(queue.Empty):
                first = self._inbox.get(timeout=None if expiry is None else max(0.0, expiry - time.monotonic()))
                self._beat(self._deadline.FLOOR_S)
                first()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _beat(self, deadline_s: float) -> None:
        self._round += 1
        self.heartbeat = Heartbeat(self._round, deadline_s)

    def _post(self, events: Iterable[Event]) -> None:
        events = list(events)
        if events:
            self.deliver(events)

    def _publish(self, rows: int) -> None:
        scheduler = self.scheduler
        self.status = Status(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_slots=scheduler.ledger.free_slots,
            blocked_by=("kv_bytes" if scheduler.ledger.free_slots else "slot") if scheduler.waiting else None,
            step_seconds=scheduler.cost.predict(rows),
            next_start_s=next_start_s(scheduler),
        )
