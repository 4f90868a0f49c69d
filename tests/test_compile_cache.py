"""Compiled code on disk: what it depends on, two processes at once, damage, and folders that cannot be written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from tokenteller.model.kernels import cache
from tokenteller.model.kernels.launch import KERNELS

# A function that launches two kernels, so that workers compile them; prints what it computes.
NORM = """
import numpy as np
from tokenteller.model import kernels
x, out = np.arange(1, 33, dtype=np.float32).reshape(2, 16), np.empty((2, 16), np.float32)
kernels.norm(x, np.ones(16, np.float32), np.empty(0, np.float32), np.float32(1e-5), out)
active = np.empty((2, 8), np.float32)
kernels.activate(out, 0, True, active)
print(active.tobytes().hex()[:32])
"""


def start(place: Path, code: str = NORM, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | {"NUMBA_CACHE_DIR": str(place)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def done(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    return out, error


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the compiled code, and what the program prints."""
    place = tmp_path_factory.mktemp("cache")
    out, error = done(start(place))
    assert "for this CPU, once" in error and error.count("\n") == error.count("compiling")
    return place, out


def test_a_later_start_compiles_nothing_and_says_nothing(filled: tuple[Path, str]) -> None:
    place, out = filled
    before = {path.name: path.stat().st_mtime_ns for path in (place / "tokenteller").iterdir()}
    assert done(start(place)) == (out, "")
    assert {path.name: path.stat().st_mtime_ns for path in (place / "tokenteller").iterdir()} == before
    assert {name.split(".")[0] for name in before} == {"norm", "norm_rows", "activate", "activate_rows"}


def test_damaged_files_are_compiled_again(filled: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(filled[0], tmp_path / "copy")
    for number, path in enumerate(sorted((tmp_path / "copy/tokenteller").iterdir())):
        whole = path.read_bytes()
        flipped = whole[:99] + bytes([whole[99] ^ 1]) + whole[100:]
        path.write_bytes([whole[: len(whole) // 2], flipped, b""][number % 3])
    assert done(start(tmp_path / "copy"))[0] == filled[1]
    assert done(start(tmp_path / "copy")) == (filled[1], "")


def test_two_processes_and_one_that_is_killed_share_an_empty_folder(filled: tuple[Path, str], tmp_path: Path) -> None:
    killed, *others = (start(tmp_path) for _ in range(3))
    time.sleep(1.5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {done(process)[0] for process in others} == {filled[1]}
    assert done(start(tmp_path)) == (filled[1], "")


def test_a_folder_that_cannot_be_written_is_said_once_and_computes_all_the_same(
    filled: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    out, error = done(start(tmp_path / "file"))
    assert out == filled[1] and error.count("cannot be written") == 1


def test_a_folder_that_can_only_be_read_is_used(
    filled: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only install whose code was compiled before: what is written goes to the next folder."""
    read_only, other = filled[0] / "tokenteller", tmp_path / "user"
    monkeypatch.setattr(cache, "places", lambda: [read_only, other])
    monkeypatch.setattr(cache, "writable", lambda: other)
    name = next(path.name for path in read_only.iterdir())
    assert cache.read(name) is not None


def test_compiled_code_depends_on_every_source_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(cache.sources(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "sources", lambda: copy)
    kept = KERNELS["norm_rows"].body._cache
    codegen = KERNELS["norm_rows"].body.targetctx.codegen()

    def name() -> str:
        cache.fingerprint.cache_clear()
        return kept.file_name((types.intp,), codegen)

    names = [name()]
    assert name() == names[0]
    for path in sorted(copy.glob("*.py")):
        path.write_text(path.read_text() + "# changed")
        names.append(name())
    assert len(set(names)) == len(names) > 10
    cache.fingerprint.cache_clear()


def test_a_disk_that_is_full_loses_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "writable", lambda: tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.keep("name", np.arange(3))
    assert list(tmp_path.iterdir()) == []
