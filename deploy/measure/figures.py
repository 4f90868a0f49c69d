"""The figures of a run, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from measure.load import Load
from measure.result import Result

BUSY = 0.8  # share of a core from which the client may be what limits the figures
LATE_MS = 100.0  # likewise, the usual delay between a request's due time and its sending


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Count, and in milliseconds mean, standard deviation, percentiles (linear between ranks) and maximum."""
    if not seconds:
        return {"count": 0}
    ms = np.array(seconds) * 1e3
    median, p90, p95, p99 = np.percentile(ms, (50, 90, 95, 99))
    figures = {
        "mean": ms.mean(),
        "std": ms.std(),
        "median": median,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": ms.max(),
    }
    return {"count": len(ms)} | {name: round(float(value), 3) for name, value in figures.items()}


def summarise(load: Load) -> dict[str, Any]:
    """Latencies and tokens are of completed requests, rates over the whole run."""
    results, wall = load.results, load.end - load.start
    ok = [result for result in results if result.kind == "ok"]
    failed = sum(result.failed for result in results)
    tokens = _tokens(ok)
    summary: dict[str, Any] = {
        "config": {name: value for name, value in vars(load.options).items() if name != "api_key"},
        "started_at": load.started_at.isoformat(timespec="seconds"),
        "wall_s": round(wall, 3),
        "interrupted": load.interrupted,
        "requests": {
            "sent": len(results),
            "completed": len(ok),
            "failed": failed,
            "unfinished": sum(result.kind == "unfinished" for result in results),
            "peak_concurrency": load.peak,
        },
        "latency_ms": _latencies(results, ok),
        "throughput": {
            "output_tokens_per_s": round(tokens["output"] / wall, 3),
            "total_tokens_per_s": round((tokens["output"] + tokens["prompt"]) / wall, 3),
            "requests_per_s": round(len(ok) / wall, 4),
        },
        "goodput": _goodput(load.options.goodput, ok, failed, wall),
        "tokens": tokens,
        "failures": _failures(results),
        "client_cpu_share": round((load.cpu_end - load.cpu_start) / wall, 3),
    }
    return summary | {"notes": notes(summary), "per_request": [_record(result) for result in results]}


def _latencies(results: Sequence[Result], ok: Sequence[Result]) -> dict[str, dict[str, Any]]:
    return {
        "ttft": spread([r.ttft for r in ok if r.ttft is not None]),
        "tpot": spread([r.tpot for r in ok if r.tpot is not None]),
        "itl": spread([late - early for r in ok for early, late in pairwise(r.marks)]),
        "e2e": spread([r.e2e for r in ok if r.e2e is not None]),
        "client_wait": spread([r.client_wait for r in results if r.client_wait is not None]),
    }


def _tokens(ok: Sequence[Result]) -> dict[str, int]:
    """Tokens by usage, and what came over the wire. `counted_frames` are those of requests with usage."""
    return {
        "output": sum(r.output_tokens or 0 for r in ok),
        "prompt": sum(r.prompt_tokens or 0 for r in ok),
        "frames": sum(len(r.marks) for r in ok),
        "counted_frames": sum(len(r.marks) for r in ok if r.output_tokens is not None),
        "chunks": sum(r.chunks for r in ok),
        "requests_without_usage": sum(r.output_tokens is None for r in ok),
        "requests_without_text": sum(not r.marks for r in ok),
    }


def _goodput(goals: dict[str, float], ok: Sequence[Result], failed: int, wall: float) -> dict[str, Any] | None:
    if not goals:
        return None
    good, judged = sum(result.meets(goals) for result in ok), len(ok) + failed
    attainment = round(good / judged, 4) if judged else None
    return {"limits_ms": goals, "good": good, "requests_per_s": round(good / wall, 4), "slo_attainment": attainment}


def _failures(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By kind, everything that was not completed, with the detail of its first case."""
    out: dict[str, dict[str, Any]] = {}
    for kind in sorted({result.kind for result in results} - {"ok"}):
        those, waits = [result for result in results if result.kind == kind], []
        for result in those:
            with suppress(ValueError):
                waits.append(float(result.retry_after))
        example = "".join(c if c.isprintable() else " " for c in those[0].detail)[:300]
        out[kind] = {"count": len(those), "example": example}
        if waits:
            out[kind]["retry_after_s"] = {"count": len(waits), "min": min(waits), "max": max(waits)}
    return out


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the figures."""
    out: list[str] = []
    tokens, completed, share = summary["tokens"], summary["requests"]["completed"], summary["client_cpu_share"]
    if share > BUSY:
        advice = "Run several of it, on another machine if possible."
        out.append(f"This client used {share:.0%} of a core: it may be the limit, not the server. {advice}")
    if (late := summary["latency_ms"]["client_wait"].get("median", 0.0)) > LATE_MS:
        out.append(f"Half of the requests went out over {late:.0f} ms late: this client or its machine cannot keep up.")
    if missing := tokens["requests_without_usage"]:
        out.append(f"{missing} of {completed} completed requests came without usage: their tokens are not counted.")
    if (frames := tokens["counted_frames"]) < (output := tokens["output"]):
        out.append(f"{output} tokens came in {frames} frames: ITL is the gap between frames, TPOT is per token.")
    if (chunks := tokens["chunks"]) < (frames := tokens["frames"]):
        out.append(f"{frames} frames came in {chunks} chunks: frames of one chunk have gap 0.")
    if silent := tokens["requests_without_text"]:
        out.append(f"{silent} of {completed} completed requests had no text: they have no TTFT, TPOT or E2E.")
    return out


def _record(result: Result) -> dict[str, Any]:
    times = {"sent": result.sent_s, "client_wait": result.client_wait}
    times |= {"ttft": result.ttft, "tpot": result.tpot, "e2e": result.e2e}
    return {
        "index": result.index,
        "kind": result.kind,
        **{f"{name}_ms": None if s is None else round(s * 1e3, 3) for name, s in times.items()},
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "frames": len(result.marks),
        "finish_reason": result.finish or None,
    }
