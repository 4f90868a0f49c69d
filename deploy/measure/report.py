"""The report of a load test for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLUMNS = ("mean", "median", "std", "p90", "p95", "p99", "max")


def print_report(summary: dict[str, Any], console: Console) -> None:
    table = Table("", title="latency, ms", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, figures in summary["latency_ms"].items():
        values = [figures.get(column) for column in COLUMNS]
        cells = ["-" if value is None else f"{value:.{1 if value < 1000 else 0}f}" for value in values]
        table.add_row("client wait" if name == "client_wait" else name.upper(), *cells)
    console.print(table)
    for line in _lines(summary):
        console.print(Text(line), soft_wrap=True)


def _lines(summary: dict[str, Any]) -> list[str]:
    counts, rates, tokens = summary["requests"], summary["throughput"], summary["tokens"]
    lines = [
        f"requests     {counts['sent']} sent, {counts['completed']} completed, {counts['failed']} failed, "
        f"{counts['unfinished']} unfinished; peak concurrency {counts['peak_concurrency']}",
        f"throughput   {rates['output_tokens_per_s']:.1f} output tokens/s, {rates['total_tokens_per_s']:.1f} total "
        f"tokens/s, {rates['requests_per_s']:.2f} requests/s over {summary['wall_s']:.1f} s",
        f"tokens       {tokens['prompt']} prompt, {tokens['output']} output (by usage)",
        f"client       {summary['client_cpu_share']:.0%} of a core",
    ]
    if goodput := summary["goodput"]:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in goodput["limits_ms"].items())
        share = "-" if goodput["slo_attainment"] is None else f"{goodput['slo_attainment']:.1%}"
        lines.append(f"goodput      {goodput['requests_per_s']:.2f} requests/s, SLO attainment {share} ({limits})")
    for kind, failure in summary["failures"].items():
        waits = failure.get("retry_after_s")
        after = f", Retry-After {waits['min']:g} to {waits['max']:g} s" if waits else ""
        example = f": {failure['example']}" if failure["example"] else ""
        lines.append(f"{kind:<12} {failure['count']}{after}{example}")
    lines += [f"NOTE         {note}" for note in summary["notes"]]
    return lines + ["NOTE         Interrupted: these are the figures so far."] * summary["interrupted"]
