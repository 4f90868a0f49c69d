"""tokenteller plan: how many sequences fit in memory, from the model's config alone."""

from __future__ import annotations

import json

from pydantic_settings import CliApp

from tokenteller.server.planning import make_plan, plan_text
from tokenteller.server.settings import PlanSettings


def run(arguments: list[str]) -> int:
    settings = CliApp.run(PlanSettings, cli_args=arguments)
    plan = make_plan(settings)[2]
    print(json.dumps(plan.to_json()) if settings.json_ else plan_text(plan))
    return 0
