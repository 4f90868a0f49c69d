"""The figures of a bench as text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from tokenteller.model.kv_memory import size

PARTS = ("products", "attention", "elementwise", "sampling", "python", "hand_over")


def bench_text(report: dict[str, Any]) -> str:
    points, weights, pool = report["points"], report["weights_planned_bytes"], report["pool_resident_bytes"]
    headings = ["streams", "context", "ms/step", "tokens/s"]
    if "shares" in points[0]:
        headings += [*(name.replace("_", " ") for name in PARTS), "loop us/token", "floor ms", "GB/s", "GFLOP/s"]
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        table.add_row(*_cells(point))
    out = StringIO()
    Console(file=out, width=160).print(table)
    rest = size(report["resident_bytes"] - weights - pool)
    return (
        f"{report['model']} in {report['weights']}, {report['threads']} threads\n\n{out.getvalue()}\n"
        f"resident  {size(report['resident_bytes'])}: weights {size(weights)} as planned, "
        f"K/V {size(pool)} of {size(report['pool_planned_bytes'])}, the rest {rest}"
    )


def _cells(point: dict[str, Any]) -> list[str]:
    cells = [str(point["streams"]), f"{point['context']:,}", f"{point['step_s'] * 1e3:.2f}"]
    cells.append(f"{point['tokens_per_s']:,.0f}")
    if "shares" in point:
        floor = point["floor"]
        cells += [f"{point['shares'][name]:.1%}" for name in PARTS]
        cells += [f"{point['loop_cpu_s'] / point['streams'] * 1e6:.0f}", f"{floor['seconds'] * 1e3:.2f}"]
        cells += [f"{floor['bytes_per_s'] / 1e9:.0f}", f"{floor['operations_per_s'] / 1e9:.0f}"]
    return cells
