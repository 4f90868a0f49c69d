"""Standard streams that are closed, full, or read by nobody."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


def open_standard_streams() -> None:
    """Puts /dev/null where a standard stream is closed, so that no socket or file gets its descriptor."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def silence_stdout() -> None:
    """Discards what is still buffered for stdout; the interpreter would fail on it again at exit."""
    with suppress(io.UnsupportedOperation):  # a stdout that is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
