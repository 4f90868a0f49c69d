"""Processes that compile side by side: numba holds a lock while it compiles, so threads would not help.

What they compile comes back through the disk cache. Where a process cannot be started or fails, the caller compiles.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from queue import PriorityQueue
from typing import Any

from numba.core.serialize import dumps

from tokenteller.model.machine import usable_cpus

Job = tuple[str, tuple[Any, ...]]  # the name of a compiled function and the types of its arguments

_LONGEST = ("forward", "attend_runs", "multiply_integers", "multiply_floats")  # begun first
_CPU_SECONDS = 10  # to compile what a model needs, roughly
_START = "import sys; sys.path[:] = {path!r}; from tokenteller.model.kernels.worker import serve; serve({place!r})"


class Workers:
    """Worker processes, one per CPU at most; they end once nothing is left to compile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: PriorityQueue[tuple[int, int, Job | None]] = PriorityQueue()
        self._done: dict[Job, threading.Event] = {}
        self._threads = 0
        self._began = 0.0
        self._progress_shown = False

    def submit(self, job: Job, place: Path, processes: int = 0) -> None:
        """Starts compiling for the cache in folder `place`. `processes`: how many to have, as more jobs will follow."""
        with self._lock:
            if job in self._done:
                return
            if not self._threads:
                self._began, self._progress_shown = time.monotonic(), False
            self._done[job] = threading.Event()
            name = job[0].partition(".")[0]
            urgency = _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
            self._queue.put((urgency, len(self._done), job))
            wanted = min(max(self._threads + 1, processes), usable_cpus().usable)
            for _ in range(self._threads, wanted):
                self._threads += 1
                threading.Thread(target=self._work, args=(place,), daemon=True, name="compile").start()

    def wait(self, job: Job) -> None:
        """Returns once a submitted job has ended, whether or not it succeeded."""
        if not self._threads or job not in self._done:
            return
        if not self._progress_shown and self._unfinished():
            self._progress_shown = True
            cpus = usable_cpus().usable
            estimate = f"about {max(5, round(_CPU_SECONDS / cpus))} s on {cpus} CPU{'s' * (cpus > 1)}"
            print(f"compiling for this CPU, once ({estimate})", end="", file=sys.stderr, flush=True)
        self._done[job].wait()
        with self._lock:
            if self._threads and not self._unfinished():
                if self._progress_shown:
                    seconds = time.monotonic() - self._began
                    kernels = f"{len(self._done)} kernel{'s' * (len(self._done) > 1)}"
                    print(f": {kernels}, {seconds:.1f} s", file=sys.stderr, flush=True)
                for _ in range(self._threads):
                    self._queue.put((len(_LONGEST) + 1, 0, None))
                self._threads = 0

    def _unfinished(self) -> bool:
        return not all(event.is_set() for event in self._done.values())

    def _work(self, place: Path) -> None:
        """Owns one process and hands it one job after the other."""
        command = [sys.executable, "-c", _START.format(path=sys.path, place=str(place))]
        pipe: Any = subprocess.PIPE
        process = None
        with suppress(OSError):
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        while job := self._queue.get()[2]:
            if process:
                for needed in _compile(process, job):
                    self.submit(needed, place)
            self._done[job].set()
        if process:
            process.communicate()


def _compile(process: subprocess.Popen[bytes], job: Job) -> Iterable[Job]:
    """Has a process compile a job. Yields the kernels that it calls, as the process finds them."""
    assert process.stdin and process.stdout
    with suppress(OSError):  # it has ended
        process.stdin.write(dumps(job).hex().encode() + b"\n")
        process.stdin.flush()
        while line := process.stdout.readline().strip():
            yield pickle.loads(bytes.fromhex(line.decode()))


workers = Workers()
