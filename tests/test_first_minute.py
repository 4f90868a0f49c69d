"""The measurement of a first start: a real server, and a clone that is really used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import first_minute
import pytest

ROOT = Path(__file__).parents[1]
SERVE = [sys.executable, "-m", "tokenteller.server", "serve"]


def test_a_start_is_measured_until_the_first_token(rand: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / ".ci/src")}
    figures = first_minute.start([*SERVE, "--model", str(rand), "--threads", "1"], env, timeout=100)
    assert 0.1 < figures["ready_s"] < figures["first_token_s"] < 100
    assert figures["cpu_s"] > 0.1 and 50 < figures["peak_mib"] < 4096


def test_a_server_that_ends_is_an_error_with_its_output() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no such model"):
        first_minute.start([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], dict(os.environ), 30)


def test_memory_of_child_processes_counts() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        assert {os.getpid(), child.pid} <= set(first_minute.family(os.getpid()))
        assert 0 < first_minute.memory(child.pid, "VmRSS") <= first_minute.memory(child.pid, "VmHWM")
        child.kill()
    assert first_minute.memory(child.pid, "VmRSS") == 0


def test_the_clone_is_imported_and_settings_of_this_machine_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENTELLER_PORT", "1")
    env = first_minute.clone(ROOT, tmp_path)
    code = "import tokenteller.server as server; print(server.__file__)"
    file = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert Path(file.strip()).is_relative_to(tmp_path)
    assert Path(env["NUMBA_CACHE_DIR"]).is_relative_to(tmp_path) and "TOKENTELLER_PORT" not in env
