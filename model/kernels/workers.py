"""Processes that compile kernels at the same time: numba holds a lock while it compiles, so threads would not help.

What they compile comes back by way of the disk cache. Where a process cannot be started or fails, the caller compiles.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from numba.core import config
from numba.core.serialize import dumps

Job = tuple[str, tuple[Any, ...]]  # a kernel's name and the types of its arguments

_START = "import sys; sys.path[:] = {path!r}; from tokenteller.model.kernels.worker import serve; serve({place!r})"


class Workers:
    """As many processes as there are CPUs and jobs; they end when nothing is left to do."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._done: dict[Job, threading.Event] = {}
        self._threads = 0
        self._began = 0.0
        self._said = False

    def submit(self, job: Job, place: Path) -> None:
        """Begins to compile, for the cache in a folder."""
        if job in self._done:
            return
        if not self._threads:
            self._began, self._said = time.monotonic(), False
        self._done[job] = threading.Event()
        self._queue.put(job)
        if self._threads < config.NUMBA_NUM_THREADS:
            self._threads += 1
            threading.Thread(target=self._work, args=(place,), daemon=True, name="compile").start()

    def wait(self, job: Job) -> None:
        """Until a submitted job is done, well or not."""
        if job not in self._done:
            return
        if not self._said:
            self._said = True
            print(f"compiling {len(self._done)} kernels for this CPU, once", end="", file=sys.stderr, flush=True)
        self._done[job].wait()
        del self._done[job]
        if not self._done:
            print(f": {time.monotonic() - self._began:.1f} s", file=sys.stderr, flush=True)
            for _ in range(self._threads):
                self._queue.put(None)
            self._threads = 0

    def _work(self, place: Path) -> None:
        """One thread's loop: it has a process of its own and hands it one job after the other."""
        command = [sys.executable, "-c", _START.format(path=sys.path, place=str(place))]
        pipe: Any = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError:
            process = None
        while job := self._queue.get():
            if process:
                _ask(process, job)
            self._done[job].set()
        if process:
            process.communicate()


def _ask(process: subprocess.Popen[bytes], job: Job) -> None:
    """Hands a job over and waits for its end, or for that of the process."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(dumps(job).hex().encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
    except OSError:
        pass  # it has ended


workers = Workers()
