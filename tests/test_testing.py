"""tokenteller.testing: servers for other people's tests, which find their own process as it was."""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from live import parse_sse, stream_raw

from tokenteller.server import embedded
from tokenteller.server.settings import ServeSettings
from tokenteller.testing import RunningServer, StartError, running

EXAMPLE = Path(__file__).parent / "example"


def text(server: RunningServer) -> str:
    body = {"prompt": "To be", "max_tokens": 8, "temperature": 0, "stream": False}
    with httpx.Client(trust_env=False) as client:
        return str(client.post(f"{server.url}/generate", json=body).json()["choices"][0]["text"])


def refuses(url: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex((httpx.URL(url).host, httpx.URL(url).port)) != 0


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def leftovers() -> tuple[set[threading.Thread], int]:
    """The threads and the number of open files of this process."""
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def test_several_run_at_once_nested_and_in_threads_and_leave_no_thread_file_or_port() -> None:
    with running() as server:
        alone = text(server)  # what the libraries open once, they have opened now
    before = leftovers()

    def use(_: int) -> str:
        with running() as server:
            return text(server)

    with running() as outer, running(slots=2) as inner:
        assert outer.url != inner.url and text(outer) == text(inner) == alone
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(use, range(3))) == [alone] * 3
    assert refuses(outer.url) and refuses(inner.url)
    assert leftovers() == before


@pytest.mark.parametrize("process", [False, True])
def test_a_failed_start_raises_with_the_servers_own_reason_and_leaves_nothing(process: bool) -> None:
    before = leftovers()
    wrong = {
        "model '/nowhere'": {"model": "/nowhere"},
        "the pool has 10 KiB": {"kv_memory": "10KiB"},
        "^slots: .* greater than or equal to 1": {"slots": 0},
        "^slot: no such setting": {"slot": 3},
    }
    for reason, settings in wrong.items():
        with pytest.raises(StartError, match=reason), running(process=process, **settings):
            pass
    assert leftovers() == before


def test_a_taken_port_is_an_error_of_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match="in use"), running(port=port):
            pass


def test_what_the_block_raises_passes_through_once_the_server_has_ended() -> None:
    before = leftovers()
    with pytest.raises(ZeroDivisionError), running() as server:
        assert text(server)
        raise ZeroDivisionError
    assert refuses(server.url) and leftovers() == before


def test_an_interrupt_while_it_loads_is_raised_at_once_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before, create_app, go_on = leftovers(), embedded.create_app, threading.Event()

    def slow(settings: object) -> object:
        _thread.interrupt_main()
        assert go_on.wait(10)
        return create_app(settings)

    monkeypatch.setattr(embedded, "create_app", slow)
    with pytest.raises(KeyboardInterrupt), running():
        pass
    go_on.set()
    wait_for(lambda: leftovers() == before)


def test_streams_may_finish_when_the_block_is_left_and_are_ended_after_the_time_they_have() -> None:
    endings = []
    for settings in ({}, {"shutdown_timeout": 0}):
        with ThreadPoolExecutor(1) as pool:
            with running(**settings) as server:
                stream = pool.submit(stream_raw, server.url, max_tokens=900, ignore_eos=True)
                with httpx.Client(trust_env=False) as client:
                    wait_for(lambda: client.get(f"{server.url}/slots").json()["slots"][0]["state"] == "running")
            endings.append(parse_sse(stream.result())[-1]["finish_reason"])
    assert endings == ["length", "shutdown"]


def test_a_stuck_engine_does_not_keep_the_block_from_being_left() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with embedded.embedded(ServeSettings(port=0, shutdown_timeout=0)) as server:
            server.service.engine.runner.run = lambda step: go_on.wait(60)
            stream = pool.submit(stream_raw, server.url)
            wait_for(lambda: len(server.service.streams) == 1)
            left = time.monotonic()
        assert time.monotonic() - left < 10 and stream.result()
    go_on.set()


def test_stop_may_come_early_and_twice() -> None:
    with running() as server:
        server.stop()
        assert refuses(server.url)
        server.stop()


HOST = """
import asyncio, gc, logging, signal, threading
import torch
from tokenteller.testing import running
torch.set_num_threads(2)
def state():
    in_new_thread = []
    threading.Thread(target=lambda: in_new_thread.append(torch.get_num_threads())).start()
    loggers = [logging.getLogger(name) for name in (None, "tokenteller", "uvicorn", "uvicorn.error", "asyncio")]
    return (
        torch.get_num_threads(), in_new_thread, gc.get_freeze_count(), gc.isenabled(),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        [(logger.level, logger.handlers, logger.propagate, logger.disabled) for logger in loggers],
        asyncio.get_event_loop_policy().__class__,
    )
before = state()
with running(threads=1):
    assert state() == before, state()
assert state() == before, state()
"""


def test_threads_of_torch_signals_loggers_and_the_garbage_collector_stay_the_hosts() -> None:
    subprocess.run([sys.executable, "-c", HOST], check=True, timeout=60)


def test_a_forked_child_that_leaves_the_block_ends_no_server() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running()), stack.enter_context(running(process=True))]
        answers = [text(server) for server in servers]
        child = os.fork()
        if not child:
            stack.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [text(server) for server in servers] == answers == answers[:1] * 2


def test_a_server_in_a_process_ends_with_the_one_that_started_it_however_that_ends() -> None:
    program = (
        "from tokenteller.testing import running\nwith running(process=True) as s: print(s.url, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as host:
        assert host.stdout is not None
        url = host.stdout.readline().strip()
        assert not refuses(url)
        host.send_signal(signal.SIGKILL)
    wait_for(lambda: refuses(url))


def test_the_plugin_and_the_module_load_neither_torch_nor_pydantic() -> None:
    heavy = {"torch", "numba", "numpy", "pydantic", "httpx", "uvicorn", "fastapi"}
    code = f"import sys, tokenteller.pytest_plugin, tokenteller.testing; sys.exit(str({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()"


def test_the_example_project_streams_from_the_fixture_with_settings_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='session')\ndef tokenteller_settings(): return {'slots': 3}\n"
    )
    (tmp_path / "test_settings.py").write_text(
        "import httpx\ndef test_slots(tokenteller_server):\n"
        "    assert len(httpx.get(tokenteller_server.url + '/slots').json()['slots']) == 3\n"
    )
    # by name, as entry points are those of what is installed and not of this checkout
    command = [sys.executable, "-m", "pytest", "-p", "no:tokenteller", "-p", "tokenteller.pytest_plugin", "-v"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout + result.stderr
