"""The README's commands do what it says, and its tree is the tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Live, parse_sse, serve

from tokenteller.model.kernels.cache import sources

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
ROOMS = ("model", "server", "deploy")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout, outside of it."""
    copy = tmp_path_factory.mktemp("copy")
    for name in TRACKED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def command(start: str) -> list[str]:
    """The first command of the README that begins so, without its comment and with this interpreter."""
    line = next(line.strip().removeprefix("$ ") for line in LINES if line.strip().removeprefix("$ ").startswith(start))
    words = shlex.split(line.split("  #")[0].split(" [")[0])
    if words[0] == "tokenteller":
        return [sys.executable, "-m", "tokenteller.server", *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def run(copy: Path, words: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(copy / ".ci/src"), "NUMBA_CACHE_DIR": str(sources() / "__pycache__")}
    result = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, timeout=100, check=False)
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


def test_the_curl_line_streams(toy: Live, copy: Path) -> None:
    words = [word.replace("localhost:8000", toy.url) for word in command("curl -N")]
    frames = parse_sse(run(copy, [words[0], "-s", *words[1:]]))
    assert frames[0]["type"] == "start" and frames[-1]["type"] == "end"
    assert f'"prompt_tokens":{frames[0]["prompt_tokens"]},' in LINES[7]


def test_the_frames_have_the_fields_that_are_sent(toy: Live) -> None:
    text = (ROOT / "server/README.md").read_text()
    shown = text.split("`POST /generate` takes")[1].split("data: [DONE]")[0].split("    data: ")[1:]
    sent = toy.stream("To be", max_tokens=4)
    for frame, real in zip(map(json.loads, shown), (*sent[:2], sent[-1]), strict=True):
        assert list(frame) == list(real)
        for name in {"kv", "timing", "usage"} & set(frame):
            assert list(frame[name]) == list(real[name])


def test_plan_prints_what_the_model_room_shows(copy: Path) -> None:
    text = (ROOT / "model/README.md").read_text()
    assert "$ tokenteller plan --kv-memory 8MiB" in text
    out = [line.rstrip() for line in run(copy, command("tokenteller plan --kv-memory 8MiB")).splitlines()]
    assert [line for line in out if line and line.strip() not in text] == []


def test_generate_and_explain_run_as_written(toy: Live, copy: Path) -> None:
    words = command("tokenteller generate")
    assert len(run(copy, [*words, "--url", toy.url, "--max-tokens", "5"])) > 1
    assert "head split" in run(copy, command("python -m tokenteller.model.explain"))


def test_the_load_test_line_runs_as_written(toy: Live, copy: Path) -> None:
    words = [word.replace("http://127.0.0.1:8000", toy.url) for word in command("python deploy/load_test.py")]
    words[words.index("--requests") + 1] = "8"
    report = json.loads(run(copy, [*words, "--json", "-"]))
    assert report["requests"]["completed"] == 8


def test_the_example_is_the_test_that_is_run() -> None:
    """By tests/test_testing.py."""
    example = [line for line in (ROOT / "tests/example/test_client.py").read_text().splitlines()[1:] if line]
    shown = [line.removeprefix("    ") for line in LINES if line]
    first = shown.index(example[0])
    assert shown[first : first + len(example)] == example


def test_the_readme_is_one_page() -> None:
    assert len(LINES) <= 120


def named_in(page: str) -> list[str]:
    """The paths in the tree of a page, from the repository's root."""
    text = (ROOT / page).read_text().split("## The tree" if page == "README.md" else "## The files")[1]
    room = "" if page == "README.md" else f"{page.split('/')[0]}/"
    return [room + name for name in re.findall(r"^    ([\w./-]+)  +\S", text, re.MULTILINE)]


@pytest.mark.parametrize("page", ["README.md", *(f"{room}/README.md" for room in ROOMS)])
def test_the_trees_name_every_file_once(page: str) -> None:
    named = named_in(page)
    files = [file for file in TRACKED if page == "README.md" or file.startswith(f"{page.split('/')[0]}/")]
    files = [file for file in files if not (file.endswith("__init__.py") and not (ROOT / file).stat().st_size)]
    covered = [
        [name for name in named if file == name or (name.endswith("/") and file.startswith(name))] for file in files
    ]
    assert [file for file, names in zip(files, covered, strict=True) if len(names) != 1] == []
    assert [name for name in named if not (ROOT / name).exists()] == []
