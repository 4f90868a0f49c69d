"""Many clients at once: each gets what it would get alone, and every kind of end frees everything."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson
import pytest
from live import Live, joined, serve
from safetensors.torch import load_file, save_file

from tokenteller.server.engine.sequence import Event, Finished
from tokenteller.server.errors import SlowReader


@pytest.fixture(scope="module")
def crowd(rand: Path) -> Iterator[Live]:
    """A server with 16 slots, small prefill chunks and a short timeout for slow readers."""
    with serve(model=str(rand), slots=16, prefill_chunk=16, buffer_tokens=32, slow_reader_timeout=1.0) as server:
        yield server


def requests(count: int) -> list[dict[str, Any]]:
    """Different prompts, lengths, seeds and temperatures."""
    rng = random.Random(count)
    return [
        {
            "prompt": [rng.randrange(256) for _ in range(rng.choice([1, 2, 15, 16, 17, 60, 130]))],
            "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "seed": rng.randrange(2**53),
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


def open_socket(live: Live, path: str = "/generate", **body: Any) -> socket.socket:
    """A raw client that has sent its request and reads nothing."""
    host, port = live.url.removeprefix("http://").split(":")
    payload = orjson.dumps(body)
    client = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    client.sendall(head.encode() + payload)
    return client


def test_every_stream_in_a_crowd_equals_its_solo_run(crowd: Live) -> None:
    wanted = requests(48)
    solo = [crowd.generate(**body)["choices"][0] for body in wanted]
    with ThreadPoolExecutor(48) as threads:
        together = list(threads.map(lambda body: crowd.stream(**body), wanted))
    for alone, frames in zip(solo, together, strict=True):
        assert [t for f in frames if f["type"] == "token" for t in f["token_ids"]] == alone["token_ids"]
        assert joined(frames) == alone["text"]
    idle = crowd.wait_idle()["pool"]  # what is left is the prefix cache
    assert idle["resident_bytes"] == idle["committed_bytes"] and idle["lent_bytes"] == 0


def test_the_ledger_and_the_kernel_agree_while_streams_run(rand: Path) -> None:
    with serve(0.003, model=str(rand), slots=4, prefill_chunk=16) as live:
        clients = [open_socket(live, prompt=[at] * 100, max_tokens=150, ignore_eos=True) for at in range(6)]
        seen, busy = 0, True
        while busy or not seen:
            pool = live.slots()
            busy = any(slot["state"] == "running" for slot in pool["slots"])
            if pool["pool"]["committed_bytes"]:
                seen += 1
                assert pool["pool"]["resident_bytes"] == pool["pool"]["committed_bytes"]
                assert pool["pool"]["committed_bytes"] == sum(slot["bytes"] for slot in pool["slots"])
        assert seen >= 3
        for client in clients:
            client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.15])
def test_a_client_that_leaves_frees_its_slot(crowd: Live, stream: bool, delay: float) -> None:
    clients = [open_socket(crowd, prompt=[3] * 90, max_tokens=160, ignore_eos=True, stream=stream) for _ in range(20)]
    time.sleep(delay)  # some wait, some are in prefill, some decode
    for client in clients:
        client.close()
    assert crowd.wait_idle(3)["pool"]["lent_bytes"] == 0
    assert len(crowd.service.streams) == 0


def test_a_reader_that_stalls_is_paused_and_then_ended_while_others_go_on(rand: Path) -> None:
    """Socket buffers would swallow the whole answer, so the stream's own reader is stalled."""
    with serve(0.003, model=str(rand), slots=2, buffer_tokens=8, slow_reader_timeout=0.5) as live:
        stalled = open_socket(live, prompt="x", max_tokens=250, ignore_eos=True)
        streams = live.service.streams
        while not streams._open:
            time.sleep(0.001)
        (stream,) = streams._open.values()
        stream._wake = _Never()  # type: ignore[assignment]
        assert live.text("other", max_tokens=200, ignore_eos=True)
        live.wait_idle(5)
        assert isinstance(stream._error, SlowReader)
        assert sum(choice.completion_tokens for choice in stream._choices) < 20
        stalled.close()


class _Never(asyncio.Event):
    """An event that never wakes anyone."""

    def is_set(self) -> bool:
        return False

    async def wait(self) -> Literal[True]:
        await asyncio.sleep(3600)
        return True


@pytest.mark.parametrize(("path", "frames"), [("/generate", 5), ("/v1/completions", 4)])
def test_frames_that_are_ready_together_go_out_in_one_write(
    crowd: Live, monkeypatch: pytest.MonkeyPatch, path: str, frames: int
) -> None:
    """All events come at once, as after the event loop was busy. One HTTP chunk is one write."""
    streams, late = crowd.service.streams, list[Event]()
    deliver = streams.deliver

    def gathered(events: list[Event]) -> None:
        late.extend(events)
        if sum(isinstance(event, Finished) for event in late) == 2:
            deliver(late)

    monkeypatch.setattr(streams, "deliver", gathered)
    client = open_socket(crowd, path, prompt="x", n=2, max_tokens=9, stream=True, ignore_eos=True)
    raw = b""
    while not raw.endswith(b"\r\n0\r\n\r\n"):
        raw += client.recv(65536)
    client.close()
    chunks = raw.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2]
    assert [chunk.count(b"data: ") for chunk in chunks if not chunk.startswith(b":")] == [frames, 1, 0]


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_keep_alives_are_sent_in_pauses_and_not_between_tokens(
    rand: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """Tokens come faster than the keep-alive period, over several periods; in one case with a pause."""
    monkeypatch.setattr("tokenteller.server.api.stream.KEEP_ALIVE_S", 0.3)
    with serve(0.03, model=str(rand), slots=1) as live:
        runner = live.service.engine.runner
        run, steps = runner.run, iter(range(100))
        monkeypatch.setattr(runner, "run", lambda step: (time.sleep(pause * (next(steps) == 15)), run(step))[1])
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        with httpx.stream("POST", live.url + "/generate", json=body, timeout=30) as response:
            raw = b"".join(response.iter_raw()).decode()
    told = raw[raw.index('"type":"start"') :].count("\n\n: ")
    assert (1 <= told <= 3) if pause else told == 0, raw


def test_random_aborts_leak_nothing(crowd: Live) -> None:
    rng = random.Random(1)

    def one(body: dict[str, Any]) -> None:
        client = open_socket(crowd, **body)
        if rng.random() < 0.4:
            time.sleep(rng.random() * 0.05)
        else:
            while client.recv(65536).find(b"[DONE]") < 0:
                pass
        client.close()

    with ThreadPoolExecutor(24) as threads:
        list(threads.map(one, requests(200)))
    assert crowd.wait_idle()["pool"]["lent_bytes"] == 0
    crowd.service.engine.ask(lambda scheduler, _: scheduler.ledger.check()).result(5)
    assert len(crowd.service.streams) == 0
    assert crowd.text("still well", max_tokens=3, temperature=0) == crowd.text(
        "still well", max_tokens=3, temperature=0
    )


def test_a_poisoned_row_fails_alone(rand: Path, tmp_path: Path) -> None:
    """A token whose embedding is NaN fails its own request, not its neighbours or the slot's next request."""
    directory = shutil.copytree(rand, tmp_path / "poison")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, directory / "model.safetensors")
    with serve(model=str(directory), slots=1) as live:
        clean = live.text("abc", max_tokens=20, temperature=0, stop_token_ids=[7])
        frames = live.stream([97, 7, 98], max_tokens=5)
        assert frames[-1]["type"] == "error" and "not finite" in frames[-1]["error"]["message"]
        assert live.post(prompt=[7], stream=False).status_code == 500
        assert live.text("abc", max_tokens=20, temperature=0, stop_token_ids=[7]) == clean
        assert live.wait_idle()["pool"]["lent_bytes"] == 0


def test_an_idle_server_uses_no_cpu(crowd: Live) -> None:
    crowd.wait_idle()
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05
