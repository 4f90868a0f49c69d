"""The program of a process that `workers` starts: it compiles what it is asked to, into the disk cache."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from numba.core.serialize import dumps

import tokenteller.model.kernels.cache as cache
import tokenteller.model.kernels.launch as launch
from tokenteller.model.kernels.forward import forward_named
from tokenteller.model.kernels.workers import Job


def serve(place: str) -> None:
    """Reads jobs from stdin, a line each. Answers with a line for each kernel that the job calls, then an empty one."""
    cache.use(Path(place))
    launch.compile_elsewhere = _report
    launch.runs_here = False
    for line in sys.stdin.buffer:
        job: Job = pickle.loads(bytes.fromhex(line.decode()))
        name, args = job
        if name in launch.KERNELS:
            launch.KERNELS[name].compile(args)
        else:
            forward_named(name).compile(args)
        print(flush=True)


def _report(job: Job, place: Path, processes: int = 0) -> None:
    """In place of `workers.submit`: has the process that started this one submit it."""
    print(dumps(job).hex(), flush=True)
