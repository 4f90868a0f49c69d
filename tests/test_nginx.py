"""deploy/nginx.conf in front of two servers, for real."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from live import CLIENT, Live, free_port, serve

from tokenteller.server.api.admission import QueueLimits

DEPLOY = Path(__file__).parent.parent / "deploy"


@contextmanager
def nginx(directory: Path, *servers: Live) -> Iterator[str]:
    """The nginx.conf of deploy/ over these servers, on a port of its own."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed here: apt-get install nginx-light")
    port, text = free_port(), (DEPLOY / "nginx.conf").read_text()
    for at, server in enumerate(servers, start=1):
        text = text.replace(f"server-{at}:8000", server.url.removeprefix("http://"))
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/nginx", f"{directory}/nginx")
    (directory / "nginx.conf").write_text(text)
    command = ["nginx", "-c", str(directory / "nginx.conf"), "-p", str(directory), "-g", "daemon off;"]
    with subprocess.Popen(command) as popen:
        try:
            while True:
                with suppress(httpx.TransportError):
                    CLIENT.get(f"http://127.0.0.1:{port}/health")
                    break
                assert popen.poll() is None
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            popen.terminate()


@pytest.fixture(scope="module")
def pair(rand: Path) -> Iterator[tuple[Live, Live]]:
    with serve(model=str(rand), slots=4) as one, serve(model=str(rand), slots=4) as two:
        yield one, two


def served(pair: tuple[Live, Live]) -> list[int]:
    return [live.service.metrics.requests_served for live in pair]


def test_nginx_keeps_a_session_on_one_server_where_its_prefix_is(pair: tuple[Live, Live], tmp_path: Path) -> None:
    with nginx(tmp_path, *pair) as url:
        homes = []
        for session in range(16):
            headers, before, cached = {"X-Session-Id": f"session-{session}"}, served(pair), []
            for turn in range(3):
                body = {"prompt": f"session {session}: " + "and so on " * (3 + turn), "max_tokens": 4, "stream": False}
                answer = CLIENT.post(url + "/generate", json=body, headers=headers).json()
                cached.append(answer["usage"]["cached_tokens"])
            grown = [after - then for after, then in zip(served(pair), before, strict=True)]
            assert sorted(grown) == [0, 3]
            assert cached[1] > 0 and cached[2] > 0
            homes.append(grown.index(3))
        assert 0 < sum(homes) < 16  # and sessions are spread
        before = served(pair)
        for _ in range(16):
            CLIENT.post(url + "/generate", json={"prompt": "x", "max_tokens": 1, "stream": False})
        assert min(after - then for after, then in zip(served(pair), before, strict=True)) > 0


def test_nginx_passes_each_token_at_once_and_a_client_that_leaves_frees_its_slot(
    pair: tuple[Live, Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for live in pair:
        run = live.service.engine.runner.run
        monkeypatch.setattr(live.service.engine.runner, "run", lambda step, run=run: (time.sleep(0.02), run(step))[1])
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    with nginx(tmp_path, *pair) as url:
        with CLIENT.stream("POST", url + "/generate", json=body) as response:
            arrivals = [time.monotonic() for _ in response.iter_raw()]
        assert len(arrivals) > 20 and arrivals[len(arrivals) // 2] - arrivals[0] > 0.5  # not all at the end
        with CLIENT.stream("POST", url + "/generate", json=body) as response:
            next(chunks := response.iter_raw())
            assert sum(len(live.service.streams) for live in pair) == 1
            del chunks
        for live in pair:
            live.wait_idle(5)


def test_nginx_asks_the_other_server_while_one_drains(rand: Path, tmp_path: Path) -> None:
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    with (
        serve(0.05, model=str(rand), slots=4) as one,
        serve(model=str(rand), slots=4) as two,
        nginx(tmp_path, one, two) as url,
        CLIENT.stream("POST", one.url + "/generate", json=long),  # what it drains for
    ):
        one.service.streams.drain_until = time.monotonic() + 60
        for session in range(8):
            headers = {"X-Session-Id": f"session-{session}"}
            body = {"prompt": "x", "max_tokens": 1, "stream": False}
            assert CLIENT.post(url + "/generate", json=body, headers=headers).status_code == 200
        assert served((one, two)) == [0, 8]


def test_nginx_passes_a_refusal_on_and_never_makes_a_502_of_it(
    pair: tuple[Live, Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served(pair)
    with nginx(tmp_path, *pair) as url:

        def ask(at: int) -> int:
            body = {"prompt": "x", "max_tokens": 1, "stream": False}
            headers = {"X-Session-Id": f"session-{at}", "X-Request-Id": f"theirs-{at}"}
            answer = CLIENT.post(url + "/generate", json=body, headers=headers)
            assert answer.headers["x-request-id"] == f"theirs-{at}"
            return answer.status_code

        monkeypatch.setattr(pair[0].service.streams, "_queue_limits", QueueLimits(-100))
        assert {ask(at) for at in range(12)} == {200}  # the other has room
        assert served(pair) == [before[0], before[1] + 12]
        monkeypatch.setattr(pair[1].service.streams, "_queue_limits", QueueLimits(-100))
        assert {ask(at) for at in range(12)} == {429}
        monkeypatch.undo()
        assert {ask(at) for at in range(12)} == {200}  # at once
