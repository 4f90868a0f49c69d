"""Fixtures that several test files share."""

from __future__ import annotations

import os

# Small matrices on busy cores: waiting for a second thread costs more than it brings. Read when torch is imported.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import random_llama
from hypothesis import settings
from live import Live, serve

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint directory, 4 query heads on 2 kv heads."""
    return random_llama(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def live(rand: Path) -> Iterator[Live]:
    """A server on the random checkpoint with 8 slots."""
    with serve(model=str(rand), slots=8) as server:
        yield server
