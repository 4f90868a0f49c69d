"""A real server for the tests of a project that talks to one.

    from tokenteller.testing import running

    def test_it_streams():
        with running(model="toy") as server:
            client = openai.OpenAI(base_url=server.base_url, api_key="unused")

The pytest fixture `tokenteller_server` is the same, started once a session.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic and torch come with the first server, not with this module
    from tokenteller.server.settings import ServeSettings

__all__ = ["RunningServer", "StartError", "running"]

# The tests need the other cores, and one that failed half-way must not wait long for the streams it left open.
DEFAULTS: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "slots": 8, "threads": 1, "shutdown_timeout": 5}


class StartError(RuntimeError):
    """The server did not start; the message is its own reason."""


@dataclass(frozen=True)
class RunningServer:
    """Where a server listens, and the name of the model it serves."""

    url: str
    model: str
    stop: Callable[[], None] = field(repr=False)  # drains and ends it, as leaving the block does

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take as `base_url`."""
        return self.url + "/v1"


@contextmanager
def running(*, process: bool = False, **settings: Any) -> Iterator[RunningServer]:
    """A server on a free port of 127.0.0.1, ready when the block begins and drained when it is left.

    settings: those of `tokenteller serve`, for example model, slots, max_context or api_key. One that is not given is
    taken from DEFAULTS, then from the environment (TOKENTELLER_...).
    process: run it in a process of its own and not in a thread. Each start then takes about 3 s, where a thread takes
    less than 0.1 s for all but the first. For tests that fork, or that measure their own CPU time or memory.

    Raises StartError. What the block raises passes through, once the server has ended.
    """
    with ExitStack() as stack:
        try:
            from tokenteller.server.settings import ServeSettings

            chosen = ServeSettings(**DEFAULTS | settings)
            server = stack.enter_context(_in_process(chosen) if process else _in_thread(chosen))
        except StartError:
            raise
        except Exception as error:
            raise StartError(_reason(error)) from error
        yield server


def _reason(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        unknown = fault["type"] == "extra_forbidden"
        return f"{fault['loc'][0]}: {'no such setting' if unknown else fault['msg'].removeprefix('Value error, ')}"
    return str(error) or repr(error)


@contextmanager
def _in_thread(settings: ServeSettings) -> Iterator[RunningServer]:
    from tokenteller.server.embedded import embedded

    with embedded(settings) as server:
        yield RunningServer(server.url, server.service.model_name, server.stop)


@contextmanager
def _in_process(settings: ServeSettings) -> Iterator[RunningServer]:
    """The child serves until its stdin ends, so that it goes with this process however that ends."""
    program = "from tokenteller.testing import _serve_for_parent; _serve_for_parent()"
    child = subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    requests, reports = child.stdin, child.stdout

    def stop() -> None:
        with suppress(BrokenPipeError):
            requests.close()
        try:
            child.wait(settings.shutdown_timeout + 10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    try:
        with suppress(BrokenPipeError):
            pickle.dump(settings, requests)
            requests.flush()
        report = json.loads(reports.readline() or b"{}")
        if "url" not in report:
            raise StartError(report.get("error") or f"its process ended with exit code {child.wait()}")
        yield RunningServer(report["url"], report["model"], stop)
    finally:
        stop()
        reports.close()


def _serve_for_parent() -> None:
    """The child's program. Settings come on stdin, pickled; one line of JSON on stdout says how the start went."""
    gc.disable()  # until settle_process, as `tokenteller serve` does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both; the parent decides what it means
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_in_thread(pickle.load(sys.stdin.buffer)))
        except Exception as error:
            print(json.dumps({"error": _reason(error)}), file=reports, flush=True)
            return
        from tokenteller.server.api.app import settle_process

        settle_process()
        print(json.dumps({"url": server.url, "model": server.model}), file=reports, flush=True)
        sys.stdin.buffer.read()
