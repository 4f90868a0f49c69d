"""tokenteller plan: how many sequences fit in memory, from the model's config alone."""

from __future__ import annotations

import json

from tokenteller.server.cli.parse import parse
from tokenteller.server.planning import make_plan, plan_text
from tokenteller.server.settings import PlanSettings


def run(arguments: list[str]) -> int:
    settings = parse("plan", PlanSettings, arguments)
    plan = make_plan(settings)
    print(json.dumps(plan.kv.to_json()) if settings.json_ else plan_text(plan))
    return 0
