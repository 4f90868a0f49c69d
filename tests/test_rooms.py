"""The rooms and the arrows between them, read from the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH_FREE = (
    "tokenteller.model.config",
    "tokenteller.model.kv_memory",
    "tokenteller.model.machine",
    "tokenteller.server.settings",
    "tokenteller.server.cli.parse",
    "tokenteller.server.planning",
    "tokenteller.server.errors",
    "tokenteller.server.engine.sequence",
    "tokenteller.server.engine.ledger",
    "tokenteller.server.engine.scheduler",
)


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("model/**/*.py"), *ROOT.glob("server/**/*.py")]
    names = ("tokenteller." + ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def imports(file: Path) -> set[str]:
    """Modules that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_model_never_imports_the_server() -> None:
    for name, file in modules().items():
        if name.startswith("tokenteller.model"):
            assert not {module for module in imports(file) if module.startswith("tokenteller.server")}, name


def test_the_engine_knows_no_http_the_api_no_tensor_and_text_neither() -> None:
    for name, file in modules().items():
        tops = {module.split(".")[0] for module in imports(file)}
        if name.startswith("tokenteller.server.engine"):
            assert not tops & {"fastapi", "starlette", "uvicorn"}, name
            assert not {module for module in imports(file) if module.startswith("tokenteller.server.api")}, name
        if name.startswith("tokenteller.server.text"):
            assert not tops & {"fastapi", "starlette", "uvicorn", "torch", "numba"}, name
            rooms = ("tokenteller.server.api", "tokenteller.server.engine")
            assert not {module for module in imports(file) if module.startswith(rooms)}, name
        if name.startswith("tokenteller.server.api"):
            assert not tops & {"torch", "numba"}, name


def test_the_imports_have_no_cycle() -> None:
    known = modules()
    graph = {name: imports(file) & set(known) - {name} for name, file in known.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_bookkeeping_loads_without_torch() -> None:
    code = f"import sys, {', '.join(TORCH_FREE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
