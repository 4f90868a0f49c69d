"""Starts a server without HTTP and measures its steps."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tokenteller.model.kv_memory import rows_max, size
from tokenteller.model.sampler import SamplingParams
from tokenteller.server.api import app as root
from tokenteller.server.api.generate import NativeAnswer
from tokenteller.server.api.service import Service
from tokenteller.server.api.streams import GenerationRequest
from tokenteller.server.bench.clock import StepClock
from tokenteller.server.bench.kernels import kernel_seconds, roofline
from tokenteller.server.bench.report import PARTS
from tokenteller.server.settings import BenchSettings, ModelSettings, ServeSettings

CONTEXTS = (16, 64, 256, 1024, 4096)  # what --profile measures beside --context


def bench(settings: BenchSettings) -> dict[str, Any]:
    """Everything measured, in seconds and bytes.

    Raises what create_app raises, and ValueError for what the pool or the context cannot hold at once.
    """
    return asyncio.run(_measure(settings, root.create_app(_serve_settings(settings))))


def _serve_settings(settings: BenchSettings) -> ServeSettings:
    """Room for all sequences at once, and no draft tokens, as steps are measured and not texts."""
    chosen = settings.model_dump(include={*ModelSettings.model_fields, "threads"}, exclude={"slots"})
    most = max(settings.streams)
    chosen |= {"slots": most, "queue_limit": most, "queue_tokens": most * max(settings.context, *CONTEXTS)}
    return ServeSettings(**chosen, draft_tokens=0)


async def _measure(settings: BenchSettings, app: FastAPI) -> dict[str, Any]:
    async with app.router.lifespan_context(app):
        service: Service = app.state.service
        clock, plan, runner = StepClock(service), service.plan, service.engine.runner
        # kernels are called once all steps are measured, as they write to the pool
        cases = _cases(settings, service)
        steps = [await _decode(service, clock, settings, rows, context) for rows, context in cases]
        report = {
            "model": service.model_name,
            "weights": runner.decoder.storage,
            "threads": runner.threads,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "weights_planned_bytes": plan.weight_bytes,
            "pool_planned_bytes": plan.pool_bytes,
            "pool_resident_bytes": runner.pool.resident_bytes(),
        }
        points = [_point(service, settings.profile, *case, step) for case, step in zip(cases, steps, strict=True)]
        return report | {"points": points}


def _cases(settings: BenchSettings, service: Service) -> list[tuple[int, int]]:
    """(streams, context) of each measurement. Raises ValueError for what cannot be held at once."""
    plan, tokens, most = service.plan, _tokens(settings), max(settings.streams)
    longest = plan.max_context - tokens
    if longest < 1:
        raise ValueError(f"--steps {settings.steps} leaves no room for a prompt in a context of {plan.max_context}")

    def needed(rows: int, context: int) -> int:
        return rows * service.engine.runner.pool.layout.committed(rows_max(context, tokens))

    cases = [(rows, min(settings.context, longest)) for rows in settings.streams]
    for rows, context in cases:
        if needed(rows, context) > plan.pool_bytes:
            need = f"{rows} sequences of {context} + {tokens} tokens need {size(needed(rows, context))} of K/V"
            raise ValueError(f"--streams {rows}: {need}, the pool has {size(plan.pool_bytes)}")
    if settings.profile:
        grown = (context for context in CONTEXTS if context <= longest)
        cases += [(most, context) for context in grown if needed(most, context) <= plan.pool_bytes]
    return cases


def _tokens(settings: BenchSettings) -> int:
    """Tokens that each sequence generates, so that all decode together for --steps once the last has begun."""
    return settings.steps + 16 + max(settings.streams) // 16


async def _decode(
    service: Service, clock: StepClock, settings: BenchSettings, rows: int, context: int
) -> dict[str, float]:
    """Seconds of a step, by part, in which `rows` sequences decode after `context` tokens each."""
    prompt = [1 + at % (service.streams.vocab_size - 1) for at in range(context)]

    async def read(number: int) -> None:
        sampling = SamplingParams(settings.temperature, seed=number)
        asked = GenerationRequest(f"bench-{number}", prompt, _tokens(settings), sampling, ignore_eos=True)
        async for _ in NativeAnswer(service, await service.streams.open(asked)).frames():
            pass

    clock.measure(rows)
    await asyncio.gather(*map(read, range(rows)))
    if not (parts := clock.parts()):
        raise ValueError(
            f"the first of {rows} sequences ended, after {_tokens(settings)} tokens, before the last had begun: "
            f"raise --steps {settings.steps}"
        )
    return parts


def _point(service: Service, profile: bool, rows: int, context: int, seconds: dict[str, float]) -> dict[str, Any]:
    step = seconds["step"]
    point = {"streams": rows, "context": context, "step_s": step, "tokens_per_s": rows / step}
    if not profile:
        return point
    decoder, pool = service.engine.runner.decoder, service.engine.runner.pool
    kernels = kernel_seconds(decoder, pool, rows, context)
    scale = seconds["forward"] / sum(kernels.values())  # one by one they take longer than in one call
    seconds = seconds | {name: took * scale for name, took in kernels.items()}
    return point | {
        "shares": {name: seconds[name] / step for name in PARTS},
        "kernels_s": kernels,
        "forward_s": seconds["forward"],
        "loop_cpu_s": seconds["loop"],
        "floor": roofline(decoder, pool.layout.kv_bytes(context), rows, context),
    }
