"""tokenteller bench: how fast this machine runs the model, without HTTP."""

from __future__ import annotations

import json

from pydantic_settings import CliApp

from tokenteller.server.settings import BenchSettings


def run(arguments: list[str]) -> int:
    settings = CliApp.run(BenchSettings, cli_args=arguments)
    from tokenteller.server.bench import bench, bench_text

    report = bench(settings)
    print(json.dumps(report) if settings.json_ else bench_text(report))
    return 0
