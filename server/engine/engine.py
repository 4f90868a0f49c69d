"""The engine thread: drains its inbox, plans, runs, commits, hands events over once per step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from server.engine.runner import Runner
from server.engine.scheduler import Scheduler
from server.engine.sequence import Event, Request

log = logging.getLogger("tokenteller.engine")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Status:
    """The engine's own words after its last step; replaced whole, so any thread may read it."""

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    blocked_by: str | None = None  # what keeps the head of the queue out
    step_seconds: float = 0.0  # smoothed
    soonest_free_s: float = 0.0  # latest time until a slot comes free


class Engine:
    """Runs the scheduler and the runner on a thread of its own.

    `deliver` is called there with the events of each step, `ended` once with the reason why no more will come.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Callable[[list[Event]], None],
        ended: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.deliver = deliver
        self.ended = ended
        self.status = Status(free_slots=scheduler.ledger.free_slots)
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._guarded, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in; what still runs is failed."""

        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout=10)

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def submit(self, request: Request) -> None:
        self._inbox.put(lambda: self.scheduler.submit(request))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._inbox.put(lambda: self.scheduler.cancel(request_id, index))

    def hold(self, request_id: str, held: bool) -> None:
        self._inbox.put(lambda: self.scheduler.hold(request_id, held))

    def ask(self, question: Callable[[Scheduler, Runner], T]) -> Future[T]:
        """Answers a question about the engine's state between two steps, on its own thread."""
        answer: Future[T] = Future()

        def put() -> None:
            try:
                answer.set_result(question(self.scheduler, self.runner))
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(put)
        return answer

    def _guarded(self) -> None:
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
            step = self.scheduler.plan()
            self._post(step.events)
            began = time.monotonic()
            outcomes = self.runner.run(step)
            self._post(self.scheduler.commit(step, outcomes))
            idle = not step.spans
            self._publish(0.0 if idle else time.monotonic() - began)

    def _drain(self, block: bool) -> None:
        """Carries out all that has arrived; waits for the first when there is nothing to compute."""
        if block:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _post(self, events: Iterable[Event]) -> None:
        events = list(events)
        if events:
            self.deliver(events)

    def _publish(self, seconds: float) -> None:
        scheduler = self.scheduler
        before = self.status.step_seconds
        smoothed = before if not seconds else seconds if not before else 0.9 * before + 0.1 * seconds
        blocked = scheduler.ledger.binds(scheduler.waiting[0].request.rows_max) if scheduler.waiting else None
        self.status = Status(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_slots=scheduler.ledger.free_slots,
            blocked_by=blocked,
            step_seconds=smoothed,
            soonest_free_s=smoothed * scheduler.longest_wait_steps(),
        )
