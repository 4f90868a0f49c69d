"""Compiled code on disk: one file for each function and types, named by all that it depends on.

In NUMBA_CACHE_DIR if that is set; else beside these sources, or in the user's cache directory where those cannot be
written. A file is written under another name and renamed: of two processes that write the same one each is whole, and
one that is killed leaves at most a temporary file. Its checksum is checked when it is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from tokenteller.model.kernels.workers import workers

log = logging.getLogger("tokenteller.model")

SYMBOL = "tokenteller."  # what the symbols of kernels begin with
_CHECKSUM = 32  # bytes

Needed = list[tuple[str, tuple[Any, ...]]]  # names of kernels and the types of their arguments
_symbols: dict[str, tuple[str, tuple[Any, ...]]] = {}


def note(name: str, args: tuple[Any, ...], symbol: str) -> None:
    """That a symbol is a kernel for some types, so that code which calls it can be kept."""
    _symbols[symbol] = name, args


def sources() -> Path:
    """The folder whose files the compiled code is made from."""
    return Path(__file__).parent


@cache
def fingerprint(folder: Path) -> str:
    """Of all that compiled code depends on beside its types and the CPU: these sources, and who compiles them."""
    digest = hashlib.sha256(f"{sys.version} {numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(folder.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def places() -> list[Path]:
    """Folders in which compiled code may lie, the best first."""
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR) / "tokenteller"]
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenteller"
    return [sources() / "__pycache__", own / "kernels"]


def use(place: Path) -> None:
    """Reads and writes compiled code in this folder only."""
    global _place
    _place = place


_place: Path | None = None


def writable() -> Path:
    """The folder to write to."""
    return _place or _first_writable()


def _readable() -> list[Path]:
    return [_place] if _place else list(dict.fromkeys((*places(), writable())))


@cache
def _first_writable() -> Path:
    """The first that can be written; else one that is gone when this process ends."""
    for place in places():
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
            return place
    log.warning("no cache for compiled code: %s cannot be written; each start compiles anew", places()[-1])
    return Path(_temporary().name)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tokenteller-")


def read(name: str) -> Any:
    """What was kept under this name, or None: also where it is damaged."""
    for place in _readable():
        with suppress(OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError):
            content = (place / name).read_bytes()
            body = content[_CHECKSUM:]
            if hashlib.sha256(body).digest() == content[:_CHECKSUM]:
                return pickle.loads(body)
    return None


def keep(name: str, value: Any) -> None:
    """A disk that is full loses nothing but the file."""
    body = dumps(value)
    place = writable()
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=place, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.chmod(temporary, 0o644)
            os.replace(temporary, place / name)
        except BaseException:
            os.unlink(temporary)
            raise


class DiskCache:
    """What numba's dispatchers ask before they compile, in place of numba's own FunctionCache.

    That one keeps an index beside the code, which two processes overwrite for each other, and sees changes of one
    source file only.
    """

    def __init__(self, name: str, load_kernels: Callable[[Needed], None]) -> None:
        self.name = name
        self._load_kernels = load_kernels

    def file_name(self, signature: Any, codegen: Any) -> str:
        key = repr((tuple(signature), codegen.magic_tuple(), fingerprint(sources())))
        return f"{self.name}.{hashlib.sha256(key.encode()).hexdigest()[:24]}.kernel"

    def holds(self, signature: Any) -> bool:
        name = self.file_name(signature, cpu_target.target_context.codegen())
        return any((place / name).exists() for place in _readable())

    def load_overload(self, signature: Any, target: Any) -> CompileResult | None:
        workers.wait((self.name, tuple(signature)))
        rtsys.initialize(target)  # all that loading needs; target.refresh() loads what compiling needs, in 0.3 s
        found = read(self.file_name(signature, target.codegen()))
        if found is None:
            return None
        needed, parts = found
        self._load_kernels(needed)
        return CompileResult._rebuild(target, *parts)

    def save_overload(self, signature: Any, compiled: CompileResult) -> None:
        functions = compiled.library._final_module.functions
        needed = [_symbols[each.name] for each in functions if each.is_declaration and each.name in _symbols]
        keep(self.file_name(signature, compiled.library.codegen), (needed, compiled._reduce()))
