"""tokenteller bench: how fast this machine runs the model, without HTTP."""

from __future__ import annotations

import json

from tokenteller.server.cli.parse import parse
from tokenteller.server.settings import BenchSettings


def run(arguments: list[str]) -> int:
    settings = parse("bench", BenchSettings, arguments)
    from tokenteller.server.bench import bench, bench_text

    report = bench(settings)
    print(json.dumps(report) if settings.json_ else bench_text(report))
    return 0
