"""The tables in the documentation list exactly the settings, metrics and errors of the code.

`python tests/test_tables.py --write` writes them anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / ".ci/src"), str(ROOT / "tests")]

from tokenteller.model.kv_memory import KVLayout  # noqa: E402
from tokenteller.server import errors  # noqa: E402
from tokenteller.server.gauges import Levels  # noqa: E402
from tokenteller.server.metrics import Metrics, Served  # noqa: E402
from tokenteller.server.settings import GROUPS, ServeSettings  # noqa: E402


def settings_table() -> str:
    lines = ["| group | flag | environment | default | meaning |", "|---|---|---|---|---|"]
    for group, names in GROUPS.items():
        for name in names:
            field = ServeSettings.model_fields[name]
            default = "" if field.default in (None, ()) else f"`{field.default}`"
            flag, variable = f"`--{name.replace('_', '-')}`", f"`TOKENTELLER_{name.upper()}`"
            lines.append(f"| {group} | {flag} | {variable} | {default} | {field.description} |")
    return "\n".join(lines)


def errors_table() -> str:
    told = re.findall(r"[├└]── (\w+) +(?:(\d+) +)?(.+)", errors.__doc__ or "")
    lines = ["| code | status | type | when |", "|---|---|---|---|"]
    for name, _, meaning in told:
        kind = getattr(errors, name)
        lines.append(f"| `{kind.code}` | {kind.status} | `{kind.type}` | {meaning} |")
    return "\n".join(lines)


def metrics_table() -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in example_metrics().registry.collect():
        if family.name.startswith("process_"):
            continue
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name"})
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(lines)


def example_metrics() -> Metrics:
    """Families with a sample each, so that their labels show."""
    metrics = Metrics("toy")
    served = Served("id", "chat", 1, 0, 2, 2, ("length",), None, 0, 0.1, 0.2, 0.1, 0.1, 0.3)
    metrics.served(served)
    metrics.responded("/generate", 200)
    levels = Levels(1, {"slot": 0}, 0, {"free": 1}, 4096, 0, 0, 0, 0, 0, healthy=True, draining=False)
    metrics.show_levels(lambda: levels, {"version": "0", "model": "toy", "weights": "fp16"}, KVLayout(1, 1, 64, 64))
    return metrics


TABLES = {
    ROOT / "server/README.md": {"settings": settings_table, "errors": errors_table},
    ROOT / "deploy/README.md": {"metrics": metrics_table},
}


def with_tables(page: Path) -> str:
    """The page with every table as the code has it."""
    text = page.read_text()
    for name, table in TABLES[page].items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, rest = text.split(start)
        text = before + start + table() + "\n" + end + rest.split(end, 1)[1]
    return text


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.parent.name)
def test_the_tables_of_the_readmes_say_what_the_code_says(page: Path) -> None:
    assert with_tables(page) == page.read_text(), "run: python tests/test_tables.py --write"


def test_every_error_has_its_line_in_the_tree_with_its_true_status() -> None:
    told = {name: status for name, status, _ in re.findall(r"[├└]── (\w+) +(?:(\d+) +)?(.+)", errors.__doc__ or "")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    assert told.keys() == {kind.__name__ for kind in kinds} - {"ApiError"}
    assert all(not status or int(status) == getattr(errors, name).status for name, status in told.items())


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for page in TABLES:
        page.write_text(with_tables(page))
