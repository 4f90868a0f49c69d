"""The bench reports every figure, and the parts of a step add up. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tape

from tokenteller.server.__main__ import main
from tokenteller.server.bench.report import PARTS, bench_text
from tokenteller.server.settings import ServeSettings


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "--json", "--threads", "1", "--steps", "8", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_profile_accounts_for_every_part_of_a_step(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "--model", str(rand), "--streams", "1,3", "--context", "40", "--profile")
    cases = [(point["streams"], point["context"]) for point in report["points"]]
    assert cases == [(1, 40), (3, 40), (3, 16), (3, 64)]  # growth with context, as far as the model goes
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
    assert report["resident_bytes"] > report["weights_planned_bytes"] > 0
    assert report["pool_planned_bytes"] >= report["pool_resident_bytes"] > 0
    text = bench_text(report)
    assert all(name.replace("_", " ") in text for name in PARTS) and len(text.splitlines()) == 3 + 4 + 2


def test_without_profile_only_the_speed_is_reported(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "--model", str(rand), "--streams", "2")
    assert [set(point) for point in report["points"]] == [{"streams", "context", "step_s", "tokens_per_s"}]
    assert report["points"][0]["context"] == 256 - 8 - 16  # the model has no more
    assert len(bench_text(report).splitlines()) == 3 + 1 + 2


@pytest.mark.parametrize("wrong", [["--streams", "1,0"], ["--streams", "many"], ["--steps", "1"]])
def test_what_cannot_be_measured_is_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_more_steps_than_the_context_has_are_refused(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", str(rand), "--steps", "250"]) == 1
    assert "context of 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ["--streams", "1,8", "--kv-memory", "64KiB"],
            "--streams 8: 8 sequences of 16 + 24 tokens need 256 KiB of K/V, the pool has 64 KiB",
        ),
        (["--streams", "64", "--prefill-chunk", "1"], "before the last had begun: raise --steps 8"),
    ],
)
def test_sequences_that_cannot_decode_together_are_refused_in_one_line(
    rand: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", str(rand), "--steps", "8", "--context", "16", *wrong]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_step_has_no_draft_tokens_whatever_serve_is_set_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENTELLER_DRAFT_TOKENS", "8")
    monkeypatch.setattr("tokenteller.server.engine.drafting.MIN_STEP_S", 0.0)
    flags = ("--streams", "1", "--context", "16", "--temperature", "0")
    report = bench(capsys, "--model", str(tape(tmp_path, "a" * 64)), *flags)
    assert report["points"][0]["tokens_per_s"] > 0


def test_the_queue_holds_every_stream_whatever_serve_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_app(settings: ServeSettings) -> None:
        assert settings.slots == settings.queue_limit == 4096 and settings.queue_tokens >= 4096 * 5000
        raise MemoryError

    monkeypatch.setenv("TOKENTELLER_QUEUE_LIMIT", "1")
    monkeypatch.setattr("tokenteller.server.api.app.create_app", create_app)
    assert main(["bench", "--streams", "1,4096", "--context", "5000"]) == 1
