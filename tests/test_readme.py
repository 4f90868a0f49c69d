"""The README's commands do what it says, and its tree is the tree."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Live, parse_sse, serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()


def command(start: str) -> list[str]:
    """The first command of the README that begins so, without its comment and with this interpreter."""
    line = next(line.strip().removeprefix("$ ") for line in LINES if line.strip().removeprefix("$ ").startswith(start))
    words = shlex.split(line.split("  #")[0].split(" [")[0])
    if words[0] == "tokenteller":
        return [sys.executable, "-m", "tokenteller.server", *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def run(words: list[str]) -> str:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def toy() -> Iterator[Live]:
    with serve() as server:
        yield server


def test_the_first_token_is_in_the_first_ten_lines() -> None:
    first = "\n".join(LINES[:10])
    assert "tokenteller serve" in first and "curl" in first and '"type":"token"' in first


def test_the_set_up_lines_install_what_ci_installs() -> None:
    setup = [line.strip() for line in LINES if line.strip().startswith("python3 -m venv")]
    assert len(setup) == 2
    assert setup[0].endswith("tokenteller serve") and setup[1].endswith("-m pytest")
    ci = (ROOT / ".ci/run").read_text()
    assert "-e '.[dev]'" in setup[1] and "-e '.[dev]'" in ci and "-m pytest" in ci


def test_the_curl_line_streams(toy: Live) -> None:
    words = [word.replace("localhost:8000", toy.url) for word in command("curl -N")]
    frames = parse_sse(run([words[0], "-s", *words[1:]]))
    assert frames[0]["type"] == "start" and frames[-1]["type"] == "end"
    assert f'"prompt_tokens":{frames[0]["prompt_tokens"]},' in LINES[7]


def test_the_frames_have_the_fields_that_are_sent(toy: Live) -> None:
    shown = README.split("`POST /generate` takes")[1].split("data: [DONE]")[0].split("    data: ")[1:]
    sent = toy.stream("To be", max_tokens=4)
    for frame, real in zip(map(json.loads, shown), (*sent[:2], sent[-1]), strict=True):
        assert list(frame) == list(real)
        for name in {"kv", "timing", "usage"} & set(frame):
            assert list(frame[name]) == list(real[name])


def test_plan_prints_what_the_readme_shows() -> None:
    out = [line.rstrip() for line in run(command("tokenteller plan --kv-memory")).splitlines()]
    assert [line for line in out if line and line.strip() not in README] == []


def test_generate_and_explain_run_as_written(toy: Live) -> None:
    words = command("tokenteller generate")
    assert len(run([*words, "--url", toy.url, "--max-tokens", "5"])) > 1
    assert "head split" in run(command("python -m tokenteller.model.explain"))
    assert "preallocated pool" in run([*command("python -m tokenteller.model.explain --compare"), "--tokens", "70"])


def test_the_load_test_line_runs_as_written(toy: Live) -> None:
    words = [word.replace("http://127.0.0.1:8000", toy.url) for word in command("python deploy/load_test.py")]
    words[words.index("--requests") + 1] = "8"
    report = json.loads(run([*words, "--json", "-"]))
    assert report["requests"]["completed"] == 8


def test_the_tree_names_every_file_once() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = re.findall(r"^    ([\w./-]+)  +\S", README.split("## The tree")[1], re.MULTILINE)
    covered = {
        file for file in tracked for name in named if file == name or (name.endswith("/") and file.startswith(name))
    }
    assert sorted(set(tracked) - covered) == []
    assert [name for name in named if not (ROOT / name).exists()] == []
