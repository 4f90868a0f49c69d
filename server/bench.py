"""tokenteller bench: what this machine makes of a model without HTTP, and where the time of a step goes.

The real engine runs on its thread; its readers make SSE frames and drop them. A step's parts are clocked at the calls
between them. What is inside of a compiled step cannot be seen from without: the functions of model/kernels.py that it
consists of are called one by one on the same shapes, and what the step took is split in their proportion.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tokenteller.model import kernels
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_memory import rows_max, size
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import Linear
from tokenteller.model.sampler import SamplingParams
from tokenteller.server.api import app as root
from tokenteller.server.api.generate import frames
from tokenteller.server.api.service import Service
from tokenteller.server.api.stream import Wanted
from tokenteller.server.engine.runner import Runner
from tokenteller.server.engine.sequence import Event, Step
from tokenteller.server.settings import BenchSettings, ModelSettings, ServeSettings

PARTS = ("products", "attention", "small", "sampling", "python", "hand_over")
CONTEXTS = (16, 64, 256, 1024, 4096)


class Clock:
    """Seconds of named calls, on the engine thread collected step by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.measure(0)

    def measure(self, rows: int) -> None:
        """From now on measures steps in which so many sequences decode, and nothing else is computed."""
        self.rows = rows
        self.steps: list[dict[str, float]] = []  # seconds by call, and of the whole step
        self.loop: list[float] = []  # CPU seconds of the event loop's thread for what a step made
        self._begun = self._loop_began = 0.0  # 0: not to be measured

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed

    def watch(self, service: Service) -> None:
        """Clocks an engine's steps, and what its events cost the event loop."""
        engine, streams = service.engine, service.streams
        self.wrap(engine.scheduler, "plan", "commit")
        self.wrap(engine.runner, "_batch", "run")
        self.wrap(engine.runner.decoder, "forward")
        plan, deliver = engine.scheduler.plan, streams.deliver

        def next_step(now: float) -> Step:
            at = time.perf_counter()
            if self._begun:
                self.steps.append(self.seconds | {"step": at - self._begun})
            self.seconds = {}
            step = plan(now)
            decodes = len(step.spans) == step.rows == self.rows and all(span.samples for span in step.spans)
            self._begun = at if decodes else 0.0
            return step

        def received(events: list[Event]) -> None:
            now, whole = time.thread_time(), len(events) == self.rows
            if self._loop_began and whole:
                self.loop.append(now - self._loop_began)
            self._loop_began = now if whole else 0.0
            deliver(events)

        engine.scheduler.plan, streams.deliver = next_step, received  # type: ignore[method-assign]


async def decode(service: Service, clock: Clock, settings: BenchSettings, rows: int, context: int) -> dict[str, float]:
    """Seconds of a step, by part, in which `rows` sequences decode that have `context` tokens before them."""

    async def read(number: int) -> None:
        sampling = SamplingParams(settings.temperature, seed=number)
        wanted = Wanted(f"bench-{number}", prompt, _tokens(settings), sampling, ignore_eos=True)
        async for _ in frames(service, await service.streams.open(wanted)):
            pass

    prompt = [1 + at % (service.streams.vocab_size - 1) for at in range(context)]
    clock.measure(rows)
    await asyncio.gather(*map(read, range(rows)))
    steps = sorted(clock.steps[2:], key=lambda step: step["step"])
    if not steps:
        ended = f"of {rows} sequences the first had made {_tokens(settings)} tokens"
        raise ValueError(f"{ended} before all had begun: give more than --steps {settings.steps}")
    steps = steps[len(steps) // 4 : -(len(steps) // 4) or None]  # the middle half: parts add up, and no pause counts
    mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return mean | {
        "sampling": mean["run"] - mean["_batch"] - mean["forward"],
        "python": mean["plan"] + mean["_batch"] + mean["commit"],
        "hand_over": mean["step"] - mean["run"] - mean["plan"] - mean["commit"],
        "loop": median(clock.loop or [0.0]),
    }


def _tokens(settings: BenchSettings) -> int:
    """How many a sequence makes, so that all decode together for so many steps once the last has begun."""
    return settings.steps + 16 + max(settings.streams) // 16


def seconds_of(call: Callable[[], object]) -> float:
    """Median of what a call takes."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.15 and len(times) < 50):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def kernel_seconds(decoder: Decoder, pool: KVPool, rows: int, context: int) -> dict[str, float]:
    """The parts of a forward of `rows` sequences: products, attention and small operations, each for all layers."""
    c, model = decoder.config, decoder._model
    layers = [_layer(decoder._layers, at) for at in range(c.num_layers)]
    x, normed = np.ones((2, rows, c.width), np.float32)
    heads = np.cumsum((c.num_heads, c.num_kv_heads))
    qkv = np.ones((rows, heads[-1] + c.num_kv_heads, c.head_dim), np.float32)
    mixed = np.zeros((rows, c.num_heads, c.head_dim), np.float32)
    wide = np.ones((rows, (2 if c.gated_mlp else 1) * c.mlp_width), np.float32)
    active, logits = (np.zeros((rows, width), np.float32) for width in (c.mlp_width, c.vocab_size))
    slots, positions, ids = np.arange(rows), np.full(rows, context), torch.zeros(rows, dtype=torch.int64)
    turns = (decoder.cos[positions].numpy(), decoder.sin[positions].numpy())
    pool.kv[:rows, :, :, :, : context + 1] = 0.5  # pages never written to would all be one

    def products() -> None:
        for layer in layers:
            kernels.multiply(normed, layer.qkv, qkv.reshape(rows, -1), False)
            kernels.multiply(mixed.reshape(rows, -1), layer.out, x, True)
            kernels.multiply(normed, layer.up, wide, False)
            kernels.multiply(active, layer.down, x, True)
        kernels.multiply(normed, model.head, logits, False)

    def attention() -> None:
        split = tuple(np.split(qkv, heads, axis=1))
        for at, layer in enumerate(layers):
            where = (slots, positions, at, layer.window)
            kernels.attend(split, turns, pool.flat, model.layers, pool.lane, where, mixed)

    def small() -> None:
        decoder.embed(ids)
        for layer in layers:
            kernels.norm(x, layer.attention_norm, layer.attention_norm_bias, model.eps, normed)
            kernels.norm(x, layer.mlp_norm, layer.mlp_norm_bias, model.eps, normed)
            kernels.activate(wide, model.activation, model.gated, active)
        kernels.norm(x, model.norm, model.norm_bias, model.eps, normed)

    seconds = {part.__name__: seconds_of(part) for part in (products, attention, small)}
    for slot in range(rows):
        pool.release(slot)
    return seconds


def _layer(stacked: kernels.Layer, at: int) -> kernels.Layer:
    parts: list[Any] = []
    for part in stacked:
        panels = isinstance(part, kernels.Panels)
        parts.append(kernels.Panels(*(array[at] for array in part)) if panels else part[at])
    return kernels.Layer(*parts)


def floor(decoder: Decoder, kv_bytes: int, rows: int, context: int) -> dict[str, float]:
    """What a step must read and compute, this machine's rates for it, and the seconds that it cannot do without."""
    c, linears = decoder.config, list(decoder.linears())
    read = sum(array.nbytes for linear in linears for array in linear.panels or ()) + rows * kv_bytes
    attended = 4 * c.num_layers * c.num_heads * c.head_dim * context
    operations = rows * (sum(2 * linear.shape[0] * linear.shape[1] for linear in linears) + attended)
    numbers = torch.ones(read // 4)  # as much as a step reads, so that it lies in the same caches
    bytes_per_s = read / seconds_of(numbers.sum)
    square, x = Linear(torch.ones(1024, 1024), decoder.storage), torch.ones(256, 1024)
    operations_per_s = 2 * 256 * 1024**2 / seconds_of(lambda: square(x))
    return {
        "bytes": read,
        "bytes_per_s": bytes_per_s,
        "operations": operations,
        "operations_per_s": operations_per_s,
        "seconds": max(read / bytes_per_s, operations / operations_per_s),
    }


def bench(settings: BenchSettings) -> dict[str, Any]:
    """All that is measured, in seconds and bytes. Raises what create_app raises, ValueError for too much at once."""
    start, warm_up = Clock(), Runner.warm_up
    imported = _age()
    start.wrap(Runner, "warm_up")
    try:
        chosen = settings.model_dump(include={*ModelSettings.model_fields, "threads"}, exclude={"slots"})
        most = max(settings.streams)
        chosen |= {"slots": most, "queue_limit": most, "queue_tokens": most * max(settings.context, *CONTEXTS)}
        app = root.create_app(ServeSettings(**chosen, speculate=0))
    finally:
        Runner.warm_up = warm_up  # type: ignore[method-assign]
    ready, compiled = _age(), start.seconds["warm_up"]  # or read back what was compiled before, and two steps
    parts = {"import": imported, "load": ready - imported - compiled, "compile": compiled, "all": ready}
    return asyncio.run(_measured(settings, app, parts))


async def _measured(settings: BenchSettings, app: Any, start: dict[str, float]) -> dict[str, Any]:
    async with app.router.lifespan_context(app):
        service, clock = app.state.service, Clock()
        clock.watch(service)
        plan, runner = service.plan, service.engine.runner
        tokens, most = _tokens(settings), max(settings.streams)
        longest = plan.max_context - tokens
        if longest < 1:
            raise ValueError(f"--steps {settings.steps} leaves no room in a context of {plan.max_context}")

        def needed(rows: int, context: int) -> int:
            return rows * runner.pool.layout.committed(rows_max(context, tokens))

        cases = [(rows, min(settings.context, longest)) for rows in settings.streams]
        for rows, context in cases:
            if needed(rows, context) > plan.pool_bytes:
                bytes_ = f"{size(needed(rows, context))} of K/V, the pool has {size(plan.pool_bytes)}"
                raise ValueError(f"--streams {rows}: so many sequences of {context} + {tokens} tokens need {bytes_}")
        if settings.profile:
            grown = (context for context in CONTEXTS if context <= longest)
            cases += [(most, context) for context in grown if needed(most, context) <= plan.pool_bytes]
        points = [
            {"streams": rows, "context": n} | await decode(service, clock, settings, rows, n) for rows, n in cases
        ]
        told = {
            "model": service.model_name,
            "weights": runner.decoder.storage,
            "threads": runner.threads,
            "start_s": start,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "weights_planned_bytes": plan.weight_bytes,
            "pool_planned_bytes": plan.pool_bytes,
            "pool_resident_bytes": runner.pool.resident_bytes(),
        }
        return told | {"points": [_point(service, settings.profile, **point) for point in points]}


def _point(service: Service, profile: bool, streams: int, context: int, **took: float) -> dict[str, Any]:
    step = took["step"]
    told = {"streams": streams, "context": context, "step_s": step, "tokens_per_s": streams / step}
    if not profile:
        return told
    decoder, pool = service.engine.runner.decoder, service.engine.runner.pool
    inside = kernel_seconds(decoder, pool, streams, context)
    scale = took["forward"] / sum(inside.values())
    took |= {name: seconds * scale for name, seconds in inside.items()}
    return told | {
        "shares": {name: took[name] / step for name in PARTS},
        "kernels_s": inside,
        "forward_s": took["forward"],
        "loop_cpu_s": took["loop"],
        "floor": floor(decoder, pool.layout.kv_bytes(context), streams, context),
    }


def bench_text(told: dict[str, Any]) -> str:
    """The same for people."""
    weights, held = told["weights_planned_bytes"], told["pool_resident_bytes"]
    rest = size(told["resident_bytes"] - weights - held)
    pool = f"K/V {size(held)} of {size(told['pool_planned_bytes'])}"
    lines = [f"{told['model']} in {told['weights']}, {told['threads']} threads", ""]
    lines.append(f"{'streams':>7} {'context':>7} {'ms/step':>8} {'tokens/s':>8}")
    if "shares" in told["points"][0]:
        lines[-1] += "".join(f" {name.replace('_', ' '):>9}" for name in PARTS) + "  loop us/token  floor ms"
    lines += map(_line, told["points"])
    lines += [
        "",
        f"resident  {size(told['resident_bytes'])}: weights {size(weights)} as planned, {pool}, the rest {rest}",
    ]
    return "\n".join([*lines, "start     " + ", ".join(f"{name} {s:.2f} s" for name, s in told["start_s"].items())])


def _line(point: dict[str, Any]) -> str:
    line = f"{point['streams']:>7} {point['context']:>7,} {point['step_s'] * 1e3:>8.2f} {point['tokens_per_s']:>8,.0f}"
    if "shares" not in point:
        return line
    line += "".join(f" {point['shares'][name]:>9.1%}" for name in PARTS)
    least = point["floor"]
    rates = f"{least['bytes_per_s'] / 1e9:.0f} GB/s, {least['operations_per_s'] / 1e9:.0f} G operations/s"
    return f"{line} {point['loop_cpu_s'] / point['streams'] * 1e6:>14.0f} {least['seconds'] * 1e3:>9.2f} at {rates}"


def _age() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    with suppress(OSError):
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0
