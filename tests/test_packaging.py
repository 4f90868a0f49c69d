"""What pip makes of this tree: one import name, every file, and room for a project's own `server` and `model`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"server/package/": "tokenteller/", "server/": "tokenteller/server/", "model/": "tokenteller/model/"}
NOT_SHIPPED = {f"{room}/{name}" for room in ("model", "server") for name in ("README.md", "DECISIONS.md")} | {
    "server/api/page/screenshot.png"
}
NOT_SHIPPED |= {f"server/api/page/vendor/{name}" for name in ("fetch.sh", "SHA256SUMS")}  # how the others were made

PROJECT = """
import json, importlib.metadata, server, model, tokenteller.model.config, tokenteller.server.settings
from tokenteller.testing import running
names = [point.name for point in importlib.metadata.entry_points(group="pytest11", name="tokenteller")]
print(json.dumps({"own": [server.OWN, model.OWN], "at": tokenteller.model.config.__file__, "plugins": names}))
"""


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*words: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words, cwd=cwd)


def tracked() -> list[str]:
    return run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files alone: a build leaves files behind, and must not need any that are not tracked."""
    copy = tmp_path_factory.mktemp("source")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a server and a model of its own."""
    (tmp_path / "server.py").write_text("OWN = 'server.py'\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/__init__.py").write_text("OWN = 'model/'\n")
    (tmp_path / "main.py").write_text(PROJECT)
    (tmp_path / "test_it.py").write_text("def test_it(tokenteller_settings): assert tokenteller_settings\n")
    return tmp_path


def test_the_wheel_holds_every_tracked_file_of_model_and_server_under_one_name(wheel: Path) -> None:
    expected = {}
    for name in sorted(set(tracked()) - NOT_SHIPPED):
        folder = next((folder for folder in FOLDERS if name.startswith(folder)), None)
        if folder:
            expected[FOLDERS[folder] + name.removeprefix(folder)] = (ROOT / name).read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(held) == sorted(expected)
    assert [name for name in held if held[name] != expected[name]] == []


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installation_works_beside_a_project_with_its_own_server_and_model(
    kind: str, wheel: Path, source: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=project)
    python = venv / "bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=project).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # but not what is installed there editable
    install = [wheel] if kind == "wheel" else ["--no-build-isolation", "-e", source]
    pip("--python", python, "install", "--no-deps", *install, cwd=project)

    told = json.loads(run(python, "main.py", cwd=project))
    assert told["own"] == ["server.py", "model/"] and told["plugins"] == ["tokenteller"]
    assert Path(told["at"]).is_relative_to(site if kind == "wheel" else source)
    plan = run(venv / "bin/tokenteller", "plan", "--kv-memory", "4MiB", cwd=project)
    assert plan == run(python, "-m", "tokenteller.server", "plan", "--kv-memory", "4MiB", cwd=project)
    assert "serve" in run(venv / "bin/tokenteller", "--help", cwd=project)
    assert "1 passed" in run(python, "-m", "pytest", "-p", "no:xdist", "test_it.py", cwd=project)
