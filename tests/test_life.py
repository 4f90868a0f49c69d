"""Lifecycle: a stuck or dead engine is reported, a bad request harms nobody else, SIGTERM drains."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import random_llama
from live import CLIENT, Live, parse_sse, process, serve, stream_raw
from safetensors.torch import load_file, save_file

from tokenteller.server.api import lifecycle
from tokenteller.server.api.lifecycle import TICK_S, Watchdog
from tokenteller.server.api.stream import Stream
from tokenteller.server.engine.heartbeat import Heartbeat

SLOW_STEPS = """
import time
from tokenteller.server.engine.runner import Runner
run = Runner.run
def slow(self, step):
    time.sleep(0.02)
    return run(self, step)
Runner.run = slow
"""


@contextmanager
def streaming(url: str, count: int, **body: Any) -> Iterator[list[Future[str]]]:
    """`count` streams, once all have begun; yields futures of their raw text."""
    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(stream_raw, url, prompt=f"stream {at}", **body) for at in range(count)]
        while CLIENT.get(url + "/slots").json()["pool"]["committed_bytes"] == 0:
            time.sleep(0.02)
        while sum(s["rows"] > 12 for s in CLIENT.get(url + "/slots").json()["slots"]) < count:
            assert not any(stream.done() for stream in streams)
            time.sleep(0.02)
        yield streams


def reasons(streams: list[Future[str]]) -> list[str]:
    """How each stream ended: its finish reason, or the code of its error frame."""
    last = [parse_sse(stream.result())[-1] for stream in streams]
    return [frame["finish_reason"] if frame["type"] == "end" else frame["error"]["code"] for frame in last]


def stalled_reader(url: str, **body: Any) -> socket.socket:
    """A client that requests a stream and never reads it."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


def test_sigterm_refuses_new_requests_lets_64_streams_finish_and_exits_0_even_if_logs_hit_a_full_disk(
    rand: Path,
) -> None:
    with (
        open("/dev/full", "w") as full,
        process("--model", str(rand), "--slots", "65", patch=SLOW_STEPS, stderr=full) as server,
        streaming(server.url, 64, max_tokens=60, ignore_eos=True) as streams,
    ):
        server.signal()
        while server.status("/ready") != 503:
            time.sleep(0.01)
        refused = CLIENT.post(server.url + "/generate", json={"prompt": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "unavailable" and "draining" in refused.json()["error"]["message"]
        assert server.status("/health") == 200
        assert reasons(streams) == ["length"] * 64
        assert server.exit_code() == 0


def test_a_second_signal_ends_streams_with_shutdown_despite_stalled_readers(rand: Path) -> None:
    ends_with_shutdown(rand, shutdown_timeout=600, second=signal.SIGINT)


@pytest.mark.slow
def test_at_the_deadline_streams_end_with_shutdown_despite_stalled_readers(rand: Path) -> None:
    ends_with_shutdown(rand, shutdown_timeout=1, second=None)


def ends_with_shutdown(rand: Path, shutdown_timeout: int, second: int | None) -> None:
    flags = ("--model", str(rand), "--shutdown-timeout", str(shutdown_timeout), "--slots", "4")
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    with (
        process(*flags, patch=SLOW_STEPS) as server,
        stalled_reader(server.url, prompt="stalled", **long),
        streaming(server.url, 3, **long) as streams,
        CLIENT.stream("POST", server.url + "/generate", json={"prompt": "queued", **long}) as waiting,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "queued", "stream": False, **long}
        queued = pool.submit(CLIENT.post, server.url + "/generate", json=body)
        while CLIENT.get(server.url + "/slots").json()["waiting"] != 2:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        while second and server.status("/ready") != 503:
            time.sleep(0.01)
        if second:
            server.signal(second)
        assert reasons(streams) == ["shutdown"] * 3
        assert queued.result().status_code == 503 and queued.result().headers["retry-after"]
        assert waiting.status_code == 200
        assert [frame["error"]["code"] for frame in parse_sse(waiting.read().decode())] == ["unavailable"]
        assert server.exit_code() == 0


def test_while_loading_connections_are_refused_and_sigterm_exits_0(rand: Path) -> None:
    slow_plan = (
        "import sys, time, tokenteller.server.planning as planning\n"
        "from tokenteller.server.__main__ import main\n"
        "planning.make_plan = lambda s: (print('loading', flush=True), time.sleep(60))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = f"{slow_plan}sys.exit(main(['serve', '--port', '{port}']))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None and popen.stdout.readline() == "loading\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        popen.terminate()
        assert popen.wait(20) == 0


@pytest.mark.slow
def test_an_engine_that_stays_stuck_exits_with_code_1(rand: Path) -> None:
    hang = SLOW_STEPS.replace("time.sleep(0.02)", "time.sleep(0.02 if step.rows != 9 else 1e6)")
    with process("--model", str(rand), "--shutdown-timeout", "0", patch=hang) as server:
        assert server.status("/health") == 200
        frames = parse_sse(stream_raw(server.url, prompt="9 letters"))
        assert frames[-1]["type"] == "error" and "no progress" in frames[-1]["error"]["message"]
        assert server.exit_code() == 1


@pytest.fixture
def own(rand: Path) -> Iterator[Live]:
    """A server that a test may break."""
    with serve(model=str(rand), slots=4) as live:
        live.text("warm", max_tokens=8)  # so that every step size of these tests has a deadline
        yield live


def test_a_stuck_step_fails_health_and_all_streams_within_2_s_until_it_moves_again(
    own: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "run_queue_seconds", dict)  # the 2 s hold where CPUs are free
    runner, go_on, stuck_since = own.service.engine.runner, threading.Event(), []
    run = runner.run

    def hang(step: Any) -> Any:
        if any(len(span.sequence.tokens) == 12 for span in step.spans) and not go_on.is_set():
            stuck_since.append(time.monotonic())
            go_on.wait(60)
        return run(step)

    monkeypatch.setattr(runner, "run", hang)
    with ThreadPoolExecutor() as pool:
        streams = [
            pool.submit(stream_raw, own.url, prompt="eight ch", max_tokens=50, ignore_eos=True) for _ in range(2)
        ]
        whole = pool.submit(own.post, prompt="eight ch", max_tokens=50, stream=False, ignore_eos=True)
        ended = [parse_sse(stream.result())[-1] for stream in streams]
        seconds = time.monotonic() - stuck_since[0]
        assert all(end["type"] == "error" and end["error"]["code"] == "engine_failure" for end in ended)
        assert seconds < 2.0
        assert whole.result().status_code == 500
    health = CLIENT.get(own.url + "/health")
    assert health.status_code == 503 and health.json()["status"] == "stuck"
    assert CLIENT.head(own.url + "/ready").status_code == 503
    assert own.post(prompt="x").status_code == 503

    go_on.set()
    while CLIENT.get(own.url + "/health").status_code != 200:
        time.sleep(0.02)
    own.wait_idle()
    assert len(own.text("eight ch", max_tokens=4, temperature=0)) > 0


def test_an_engine_that_dies_is_reported_at_once_and_fails_every_stream(
    own: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, streams = own.service.engine.runner, own.service.streams
    run = runner.run

    def die(step: Any) -> Any:
        if any(len(span.sequence.tokens) > 12 for span in step.spans) and len(streams) == 6:
            raise RuntimeError("poisoned\nstep")
        time.sleep(0.01)
        return run(step)

    monkeypatch.setattr(runner, "run", die)
    with ThreadPoolExecutor() as pool:  # two of the six wait
        answers = [pool.submit(stream_raw, own.url, prompt="eight ch", max_tokens=200) for _ in range(6)]
        for answer in answers:
            last = parse_sse(answer.result())[-1]
            assert last["type"] == "error" and "RuntimeError" in last["error"]["message"]
            assert "poisoned" not in last["error"]["message"]  # that is for the log
    for path, state in (("/health", "dead"), ("/ready", "unavailable")):
        answer = CLIENT.get(own.url + path)
        assert answer.status_code == 503 and state in answer.text
    refused = own.post(prompt="x")
    assert refused.status_code == 503 and refused.headers["retry-after"]


def test_logits_that_are_not_finite_fail_only_their_own_request(tmp_path: Path) -> None:
    model = random_llama(tmp_path / "poison")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with serve(model=str(model), slots=4) as live, ThreadPoolExecutor() as pool:
        alone = live.text("a neighbour", **body)
        neighbours = [pool.submit(live.text, "a neighbour", **body) for _ in range(3)]
        for _ in range(5):
            poisoned = live.post(prompt=[1, 7, 2], stream=False, **body)
            assert poisoned.status_code == 500 and poisoned.json()["error"]["code"] == "engine_failure"
            frames = live.stream([1, 7, 2], **body)
            assert [frame["type"] for frame in frames] == ["start", "error"]
        assert [neighbour.result() for neighbour in neighbours] == [alone] * 3
        assert live.text("a neighbour", **body) == alone  # also in the poisoned slot
        assert CLIENT.get(live.url + "/health").status_code == 200
        live.wait_idle()


def test_a_bug_in_one_streams_text_does_not_affect_the_others(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Stream.receive
    body: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    alone = own.text("well", **body)

    def faulty(stream: Any, event: Any) -> None:
        if stream.request.prompt == (33, 33) and stream.started:
            raise ZeroDivisionError("a bug in a detokenizer")
        receive(stream, event)

    monkeypatch.setattr("tokenteller.server.api.stream.Stream.receive", faulty)
    with ThreadPoolExecutor() as pool:
        well = pool.submit(own.text, "well", **body)
        frames = own.stream([33, 33], **body)
        assert frames[-1]["type"] == "error" and "ZeroDivisionError" in frames[-1]["error"]["message"]
        assert well.result() == alone
    own.wait_idle()


def watched() -> tuple[Watchdog, Any, list[str]]:
    failed: list[str] = []
    streams: Any = SimpleNamespace(engine=SimpleNamespace(heartbeat=None), stuck=None, fail_all=failed.append)
    return Watchdog(streams), streams, failed


def test_a_process_that_was_suspended_finds_nothing_wrong_on_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "run_queue_seconds", dict)
    watch, streams, failed = watched()
    streams.engine.heartbeat = Heartbeat(1, 1.25)
    watch.tick()
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)  # hours passed, but only one tick
    watch.tick()
    assert not failed
    for _ in range(int(1.25 / TICK_S)):
        watch.tick()
    assert len(failed) == 1 and streams.stuck


def test_an_engine_that_waits_for_a_cpu_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = {"1": 7.0, "2": 0.0}
    monkeypatch.setattr(lifecycle, "run_queue_seconds", lambda: dict(waited))
    watch, streams, failed = watched()
    streams.engine.heartbeat = Heartbeat(1, 1.25)
    watch.tick()
    for _ in range(100):
        waited["2"] += TICK_S  # all the time
        watch.tick()
    assert not failed
    for _ in range(11):
        waited["2"] += TICK_S / 2
        watch.tick()
    assert len(failed) == 1


def test_the_kernel_reports_how_long_threads_wait_for_a_cpu() -> None:
    waited = lifecycle.run_queue_seconds()
    assert len(waited) >= threading.active_count() > 0 and all(seconds >= 0 for seconds in waited.values())


def test_an_idle_or_moving_engine_is_never_stuck() -> None:
    watch, streams, failed = watched()
    for at in range(100):
        streams.engine.heartbeat = None if at % 7 == 0 else Heartbeat(at // 4, 1.25)
        watch.tick()
    assert not failed
