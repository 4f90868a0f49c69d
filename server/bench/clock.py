"""Times the parts of a running engine's steps by wrapping the calls between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from tokenteller.server.api.service import Service
from tokenteller.server.engine.sequence import Event, Step


class StepClock:
    """Collects the steps in which exactly `rows` sequences decode and nothing else is computed."""

    def __init__(self, service: Service) -> None:
        self.seconds: dict[str, float] = {}  # of the current step, by call
        self.measure(0)
        engine, streams = service.engine, service.streams
        self._wrap(engine.scheduler, "plan", "commit")
        self._wrap(engine.runner, "_batch", "run")
        self._wrap(engine.runner.decoder, "forward")
        self._plan, self._deliver = engine.scheduler.plan, streams.deliver
        engine.scheduler.plan, streams.deliver = self._next_step, self._received  # type: ignore[method-assign]

    def _wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed

    def measure(self, rows: int) -> None:
        """Forgets what was collected and waits for steps of so many sequences."""
        self.rows = rows
        self.steps: list[dict[str, float]] = []  # seconds by call, and "step" from one plan to the next
        self.loop: list[float] = []  # CPU seconds of the event loop's thread per step
        self._step_began = self._loop_began = 0.0  # 0: not a step to measure

    def _next_step(self, now: float) -> Step:
        at = time.perf_counter()
        if self._step_began:
            self.steps.append(self.seconds | {"step": at - self._step_began})
        self.seconds = {}
        step = self._plan(now)
        decodes = len(step.spans) == step.rows == self.rows and all(span.samples for span in step.spans)
        self._step_began = at if decodes else 0.0
        return step

    def _received(self, events: list[Event]) -> None:
        now, complete = time.thread_time(), len(events) == self.rows
        if self._loop_began and complete:
            self.loop.append(now - self._loop_began)
        self._loop_began = now if complete else 0.0
        self._deliver(events)

    def parts(self) -> dict[str, float]:
        """Mean seconds by part over the middle half of the steps, so that the parts add up and pauses do not count.

        Empty if there was no such step.
        """
        steps = sorted(self.steps[2:], key=lambda step: step["step"])
        if not steps:
            return {}
        steps = steps[len(steps) // 4 : -(len(steps) // 4) or None]
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return mean | {
            "sampling": mean["run"] - mean["_batch"] - mean["forward"],
            "python": mean["plan"] + mean["_batch"] + mean["commit"],
            "hand_over": mean["step"] - mean["run"] - mean["plan"] - mean["commit"],
            "loop": median(self.loop or [0.0]),
        }


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of a call, after one to warm up."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.15 and len(times) < 50):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)
