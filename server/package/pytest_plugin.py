"""The fixture `tokenteller_server`. Every pytest run loads this file where tokenteller is installed: keep it light."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tokenteller.testing import RunningServer


@pytest.fixture(scope="session")
def tokenteller_settings() -> dict[str, Any]:
    """What `tokenteller_server` is started with, as `tokenteller.testing.running` takes it. Override it as you like."""
    return {"model": "toy"}


@pytest.fixture(scope="session")
def tokenteller_server(tokenteller_settings: dict[str, Any]) -> Iterator[RunningServer]:
    """A server for the whole session (under pytest-xdist, for each worker)."""
    from tokenteller.testing import running

    with running(**tokenteller_settings) as server:
        yield server
