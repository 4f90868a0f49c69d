"""HTTP on raw sockets: old versions, upgrades, pipelining, malformed and endless requests."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live import Live, parse_sse, serve

from tokenteller.server.api import protocol


@pytest.fixture(scope="module")
def live(chatty: Path) -> Iterator[Live]:
    with serve(model=str(chatty), slots=8) as server:
        yield server


def raw(live: Live, data: bytes, timeout: float = 20.0) -> bytes:
    """All bytes until the server closes the connection."""
    host, port = live.url.removeprefix("http://").split(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=timeout) as connection:
        connection.sendall(data)
        while chunk := connection.recv(65536):
            got += chunk
    return got


def posted(body: bytes, version: bytes = b"1.1", headers: bytes = b"", path: bytes = b"/generate") -> bytes:
    head = b"POST %s HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n" % (path, version, len(body), headers)
    return head + body


STREAMED = b'{"prompt": "x", "max_tokens": 5, "temperature": 0, "ignore_eos": true}'
WHOLE = STREAMED[:-1] + b', "stream": false}'


@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n"])
def test_an_http_1_0_client_gets_plain_bytes_until_the_connection_closes(live: Live, headers: bytes) -> None:
    head, _, body = raw(live, posted(STREAMED, b"1.0", headers)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower()
    frames = parse_sse(body.decode())
    assert frames[-1]["finish_reason"] == "length"
    head, _, body = raw(live, posted(WHOLE, b"1.0", headers)).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and b"content-length: %d" % len(body) in head.lower()
    assert json.loads(body)["choices"][0]["text"] == "".join(f["text"] for f in frames if f["type"] == "token")
    for path in (b"/health", b"/nowhere"):
        head, _, body = raw(live, b"GET %s HTTP/1.0\r\n\r\n" % path).partition(b"\r\n\r\n")
        assert json.loads(body)
    assert raw(live, b"HEAD /health HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE:h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def test_an_upgrade_is_declined_without_losing_the_body_however_it_is_split(live: Live) -> None:
    request = posted(b'{"prompt": "abc"}', headers=OFFER, path=b"/tokenize")
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(len(request)):
            for part in (request[:cut], request[cut:]):
                connection.sendall(part)
                time.sleep(0.004)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 OK") and b'"count":3' in answer, request[:cut]
        for at in range(len(request)):
            connection.sendall(request[at : at + 1])
        assert b'"count":3' in connection.recv(65536)
    websocket = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert raw(live, websocket).startswith(b"HTTP/1.1 200 OK")


def test_pipelined_requests_that_offer_upgrades_are_all_answered(live: Live) -> None:
    body, path = b'{"prompt": "abc"}', b"/tokenize"
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    plain, offer = posted(body, path=path), posted(body, headers=OFFER, path=path)
    last = posted(body, b"1.0", OFFER, path)
    answers = raw(live, plain + offer * 3 + chunked + plain + offer * 2000 + last)
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b'"count":3') == 2007
    connect = raw(live, b"CONNECT /x HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n" + last)
    assert connect.startswith(b"HTTP/1.1 404 ") and connect.count(b'"count":3') == 1


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"OPTIONS /generate", 405),
        (b"GET /generate", 405),
        (b"PUT /v1/completions", 405),
        (b"DELETE /v1/models/x", 405),
        (b"TRACE /health", 405),
        (b"GET /%00", 404),
        (b"GET /%ff%fe", 404),
        (b"GET //", 404),
        (b"GET /v1/models/%ff", 404),
        (b"GET /requests/%0d%0aSet-Cookie:%20a=b", 404),
        (b"POST /nowhere", 404),
        (b"POST /generate/", 400),  # /generate without a body; no redirect, which would be made of the client's Host
        (b"GET /generate/", 405),
        (b"GET /health/x/", 404),
        (b"GET /page", 404),
        (b"BREW /health", 400),
        (b"GET health", 400),
        ("GET /é".encode(), 400),
    ],
)
def test_odd_requests_are_refused_in_the_error_format(live: Live, request_line: bytes, status: int) -> None:
    head, _, body = raw(live, request_line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["message"]
    if status == 405:
        assert b"\r\nallow: " in head.lower()


@pytest.mark.parametrize(
    "headers",
    [b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n", b"Content-Length: 1\r\n" * 2],
)
def test_a_body_of_ambiguous_length_is_refused(live: Live, headers: bytes) -> None:
    answer = raw(live, b"POST /generate HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_broken_chunk_is_refused(live: Live) -> None:
    answer = raw(live, b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])


def test_a_huge_body_is_refused_while_health_stays_fast(live: Live) -> None:
    ended, waits = threading.Event(), []

    def probe() -> None:
        with httpx.Client() as prober:
            while not ended.wait(0.05):
                began = time.monotonic()
                assert prober.get(live.url + "/health").status_code == 200
                waits.append(time.monotonic() - began)

    prober = threading.Thread(target=probe)
    prober.start()
    part = b"x" * 65_536
    for headers in ({"Content-Length": str(64 * 2**20)}, {}):  # announced, and in chunks
        body = (part for _ in range(1024))
        response = httpx.post(live.url + "/generate", content=body, headers=headers, timeout=60)
        assert response.status_code == 413 and response.json()["error"]["max_body_bytes"] == 2**20
        assert response.headers["connection"] == "close"
    ended.set()
    prober.join()
    assert sorted(waits)[len(waits) // 2] < 0.5
    expecting = b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
    assert raw(live, expecting).startswith(b"HTTP/1.1 413 ")
    lying = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999\r\n\r\n{"
    assert raw(live, lying).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"GET /he", b"408"),
        (b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 40_000, b"4(?:31|08)"),
        (b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"no HTTP at all\r\n\r\n", b"400"),
        (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n", b"400"),
    ],
)
def test_a_bad_request_behind_a_running_one_does_not_cut_its_answer(
    rand: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, behind: bytes, status: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    body = json.dumps({"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": stream}).encode()
    with serve(0.005, model=str(rand), slots=1) as live:
        answer = raw(live, posted(body) + behind)
        live.wait_idle()
    first, _, refused = re.split(b"HTTP/1.1 (" + status + b")", answer)
    assert first.count(b"HTTP/1.1 200 OK") == 1 and first.count(b'"finish_reason":"length"') == 1
    assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_head"
