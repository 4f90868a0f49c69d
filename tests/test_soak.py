"""A short run of deploy/soak.py against a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from live import process

DEPLOY = Path(__file__).parent.parent / "deploy"


@pytest.mark.slow
def test_a_short_soak_finds_nothing_that_grows_or_is_untrue() -> None:
    with process("--slots", "8", "--queue-limit", "8", "--threads", "1") as server:
        command = [sys.executable, str(DEPLOY / "soak.py"), "--url", server.url, "--minutes", "0.3", "--clients", "24"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["clients_saw"]["finished"] > 10 and told["clients_saw"]["left"] > 3 and told["checks"] > 50
