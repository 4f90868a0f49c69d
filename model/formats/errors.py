"""What can be wrong with a model's files. Every message is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A config or header that is missing, malformed or not supported; the message names the key."""


class CheckpointError(ValueError):
    """A model that cannot be loaded; the message names the file."""


def naming(path: Path, read: Callable[[], T]) -> T:
    """read(), with any failure turned into a CheckpointError that begins with `path`."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers panics on some broken files, which is no Exception
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from error
