"""Where simulated requests come from: five seeded mixes, or a trace in a CSV file."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

COLUMNS = ("arrival", "prompt", "max_tokens", "output")


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its arrival in seconds, and in tokens its prompt, its limit and what it really generates."""

    arrival: float
    prompt: int
    max_tokens: int
    output: int


# Each mix draws (prompt, max_tokens, output).


def tight(rng: random.Random) -> tuple[int, int, int]:
    """Half of the clients ask for exactly what they use, half for up to three times as much."""
    prompt, output = _prompt(rng), _output(rng, 1024)
    exact = rng.random() < 0.5
    return prompt, output if exact else min(1024, int(output * rng.uniform(1, 3)) + 1), output


def default(rng: random.Random) -> tuple[int, int, int]:
    """Everyone asks for 512 tokens and uses about 120."""
    return _prompt(rng), 512, _output(rng, 512)


def mixed(rng: random.Random) -> tuple[int, int, int]:
    """max_tokens is one of 64 to 1,024. About 120 are used, or all of a smaller limit."""
    prompt, max_tokens = _prompt(rng), rng.choice([64, 128, 256, 512, 1024])
    return prompt, max_tokens, _output(rng, max_tokens, 0.9)


def full(rng: random.Random) -> tuple[int, int, int]:
    """As mixed, but everyone uses all of max_tokens."""
    prompt, max_tokens, _ = mixed(rng)
    return prompt, max_tokens, max_tokens


def bimodal(rng: random.Random) -> tuple[int, int, int]:
    """Short prompts and max_tokens 1,024. Three in ten use all of it, the others 5 to 200."""
    prompt = max(1, min(300, int(rng.lognormvariate(3.5, 0.6))))
    return prompt, 1024, 1024 if rng.random() < 0.3 else rng.randint(5, 200)


def _prompt(rng: random.Random) -> int:
    return max(1, min(1500, int(rng.lognormvariate(5, 0.8))))


def _output(rng: random.Random, limit: int, sigma: float = 0.7) -> int:
    return min(limit, max(1, int(rng.lognormvariate(4.8, sigma))))


MIXES = {mix.__name__: mix for mix in (tight, default, mixed, full, bimodal)}


def mix_jobs(mix: str, requests: int, seed: int) -> Iterator[Job]:
    """Jobs of a mix, all there from the start."""
    rng = random.Random(seed)
    return (Job(0.0, *MIXES[mix](rng)) for _ in range(requests))


class TraceError(Exception):
    """A trace that cannot be used. The message names the line."""


def trace_jobs(path: str) -> Iterator[Job]:
    """Jobs of a CSV file, read as they are needed. Raises TraceError."""
    line, before = 1, 0.0
    try:
        with open(path, newline="") as file:
            rows = csv.DictReader(file, restval="")
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                raise ValueError(f"needs the columns {', '.join(COLUMNS)}")
            for row in rows:
                line = rows.line_num
                job = _parse(row, before)
                before = job.arrival
                yield job
        if line == 1:
            raise ValueError("no requests")
    except (OSError, ValueError, csv.Error) as error:
        raise TraceError(f"{path}, line {line}: {error}") from None


def _parse(row: dict[str, str], before: float) -> Job:
    job = Job(float(row["arrival"]), *(int(row[name]) for name in COLUMNS[1:]))
    if not before <= job.arrival < math.inf:
        raise ValueError(f"arrival must be finite and at least {before:g}, the one before it, not {job.arrival:g}")
    if job.prompt < 1 or not 1 <= job.output <= job.max_tokens:
        raise ValueError("prompt must be at least 1, and output from 1 to max_tokens")
    return job
