"""What a process that `workers` starts does: compile the kernels it is told to, into the disk cache."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import tokenteller.model.kernels.cache as cache
from tokenteller.model.kernels.launch import KERNELS


def serve(place: str) -> None:
    """Reads jobs from stdin, a line each, and answers each with an empty line; ends with its input."""
    cache.use(Path(place))
    for line in sys.stdin.buffer:
        name, args = pickle.loads(bytes.fromhex(line.decode()))
        KERNELS[name].compile(args)
        print(flush=True)
