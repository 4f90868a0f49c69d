"""The simulator: admission rules on the real scheduler, and the model of servers that evict."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulate
from simulate import run
from simulation.jobs import MIXES, Job, mix_jobs, trace_jobs
from simulation.servers import EvictingServer, Machine, RealScheduler

from tokenteller.model.kv_memory import KVLayout

LAYOUT = KVLayout(1, 1, 64, 64)
HEADING = "arrival,prompt,max_tokens,output\n"


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", MIXES)
def test_no_simulated_request_starts_later_than_reported(mix: str, requests: int) -> None:
    layout = KVLayout(1, 1, 64, 2600)
    machine = Machine(layout, layout.committed(4096), slots=16, step_s=0.1, row_s=0.002)
    server = RealScheduler(machine, "peak")
    figures = run(server, mix_jobs(mix, requests, 7), machine)
    assert len(figures.wait_ratios) > requests // 2, "too few had to wait"
    assert figures.late == server.scheduler.counts.postponed == 0


@pytest.mark.parametrize(("keeps_text", "steps"), [(True, 33), (False, 40)])
def test_evicted_text_is_computed_again_or_generated_anew(keeps_text: bool, steps: int) -> None:
    """Three pages of 16 rows, two requests of 10 + 20 tokens. Both want row 17 in step 8, and the younger is evicted
    after 7 of its tokens. The older ends in step 20; then 13 steps or all 20 are left."""
    machine = Machine(LAYOUT, LAYOUT.committed(48))
    figures = run(EvictingServer(machine, keeps_text), iter([Job(0.0, 10, 30, 20)] * 2), machine)
    assert (figures.steps, figures.evicted, figures.tokens, len(figures.queued)) == (steps, 1, 40, 2)


def test_a_trace_arrives_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADING + "1.5,10,30,20\n100,10,30,30\n")
    machine = Machine(LAYOUT, LAYOUT.committed(64))
    figures = run(RealScheduler(machine, "peak"), trace_jobs(str(trace)), machine)
    assert (figures.steps, figures.tokens, figures.time, list(figures.queued)) == (50, 50, 130.0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "line 1: [Errno 2] No such file"),
        ("", "line 1: needs the columns arrival, prompt, max_tokens, output"),
        ("a,b\n1,2\n", "line 1: needs the columns arrival, prompt, max_tokens, output"),
        (HEADING, "line 1: no requests"),
        (HEADING + "0,10,5,5\n1,10\n", "line 3: invalid literal for int()"),
        (HEADING + "nan,10,5,5\n", "line 2: arrival must be finite and at least 0, the one before it, not nan"),
        (HEADING + "inf,10,5,5\n", "line 2: arrival must be finite and at least 0, the one before it, not inf"),
        (HEADING + "5,10,5,5\n1,10,5,5\n", "line 3: arrival must be finite and at least 5, the one before it, not 1"),
        (HEADING + "0,0,5,5\n", "line 2: prompt must be at least 1"),
        (HEADING + "0,10,5,6\n", "line 2: prompt must be at least 1, and output from 1 to max_tokens"),
    ],
)
def test_a_wrong_trace_is_one_line_with_its_number_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    trace = tmp_path / "trace.csv"
    if text is not None:
        trace.write_text(text)
    assert simulate.main(["--trace", str(trace)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"simulate: {trace}, {message}") and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    "wrong",
    [
        "--requests 0",
        "--slots 0",
        "--queue 0",
        "--chunk 0",
        "--pool-rows 1",
        "--max-context 1",
        "--step-ms nan",
        "--mix",
    ],
)
def test_a_simulation_that_could_not_end_is_wrong_usage(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.parse(wrong.split())
    assert ended.value.code == 2 and wrong.split()[0] in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rule", simulate.RULES)
def test_what_can_never_fit_is_rejected_as_by_a_server(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A context of 64 and a pool of 48 rows: 39 + 10 tokens need all of it, one more or a longer prompt never fits."""
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADING + "0,39,10,10\n0,40,10,1\n0,999,5,2\n0,1,3,3\n")
    flags = ["--trace", str(trace), "--rule", rule, "--pool-rows", "48", "--max-context", "64"]
    assert simulate.main(flags) == 0
    headings, figures = capsys.readouterr().out.splitlines()
    assert figures[headings.index("rejected") - 4 :].split()[0] == "2"
    trace.write_text(HEADING + "0,999,5,2\n")
    assert simulate.main(flags) == 0
