"""The bench: every part of a step is there once, and all that is promised is told. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.__main__ import main
from server.bench import PARTS, bench_text


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "--json", "--threads", "1", "--steps", "8", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_profile_accounts_for_every_part_of_a_step(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = told(capsys, "--model", str(rand), "--streams", "1,3", "--context", "40", "--profile")
    cases = [(point["streams"], point["context"]) for point in report["points"]]
    assert cases == [(1, 40), (3, 40), (3, 16), (3, 64)]  # and how it grows with context, as far as there is room
    for point in report["points"]:
        assert set(point["shares"]) == set(PARTS) and all(share > 0 for share in point["shares"].values())
        assert sum(point["shares"].values()) == pytest.approx(1)
        assert point["tokens_per_s"] == pytest.approx(point["streams"] / point["step_s"])
        assert 0 < point["forward_s"] < point["step_s"] and point["loop_cpu_s"] > 0
        floor = point["floor"]
        rates = floor["bytes"] / floor["bytes_per_s"], floor["operations"] / floor["operations_per_s"]
        assert floor["seconds"] == max(rates) > 0
    one, three = report["points"][:2]
    assert three["floor"]["operations"] == 3 * one["floor"]["operations"]
    assert three["floor"]["bytes"] == one["floor"]["bytes"] + 2 * 40 * 512  # the weights are read once
    assert {"import", "load", "compile", "all"} == set(report["start_s"])
    assert report["resident_bytes"] > report["weights_planned_bytes"] > 0
    assert report["pool_planned_bytes"] >= report["pool_resident_bytes"] > 0
    text = bench_text(report)
    assert all(name.replace("_", " ") in text for name in PARTS) and len(text.splitlines()) == 3 + 4 + 3


def test_without_profile_it_tells_the_speed_alone(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = told(capsys, "--model", str(rand), "--streams", "2")
    assert [set(point) for point in report["points"]] == [{"streams", "context", "step_s", "tokens_per_s"}]
    assert report["points"][0]["context"] == 256 - 8 - 16  # the model has no more
    assert len(bench_text(report).splitlines()) == 3 + 1 + 3


@pytest.mark.parametrize("wrong", [["--streams", "1,0"], ["--streams", "many"], ["--steps", "1"]])
def test_what_cannot_be_measured_is_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_more_steps_than_the_context_has_is_told(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", str(rand), "--steps", "250"]) == 1
    assert "context of 256" in capsys.readouterr().err
