"""Keys, origins, limits, TLS; and no secret in any output."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live import CLIENT, Live, serve

from tokenteller.server.__main__ import main
from tokenteller.server.api import body as body_room
from tokenteller.server.api import protocol

KEYS = ("first-key-0123", "second-key-4567")


@pytest.fixture(scope="module")
def locked(rand: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with two keys, one of them from a file, and one allowed origin."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"\n{KEYS[1]}\n")
    with serve(model=str(rand), slots=2, api_key=f"{KEYS[0]},@{file}", cors_origin="https://app.example") as live:
        yield live


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path", ["/slots", "/plan", "/metrics", "/openapi.json", "/nowhere", "//health", "/slots/", "/v1/models"]
)
def test_every_path_needs_a_key(locked: Live, path: str) -> None:
    for headers in ({}, bearer("first-key-0124"), bearer("x"), bearer(KEYS[0][:-1]), {"Authorization": KEYS[0]}):
        refused = CLIENT.get(locked.url + path, headers=headers)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key" and refused.headers["x-request-id"]


def test_a_wrong_key_runs_nothing_and_is_counted(locked: Live) -> None:
    refused = CLIENT.post(locked.url + "/generate", json={"prompt": "x"}, headers=bearer("no such key"))
    assert refused.status_code == 401
    metrics = CLIENT.get(locked.url + "/metrics", headers=bearer(KEYS[0])).text
    assert "vllm:request_prompt_tokens_count{" in metrics
    assert 'tokenteller_refusals_total{code="invalid_api_key"' in metrics
    assert locked.service.metrics.requests_served == 0


@pytest.mark.parametrize("key", KEYS)
def test_each_key_works_and_probes_need_none(locked: Live, key: str) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": False}
    assert CLIENT.post(locked.url + "/generate", json=body, headers=bearer(key)).status_code == 200
    assert CLIENT.get(locked.url + "/slots", headers={"Authorization": f"bearer {key}"}).status_code == 200
    assert CLIENT.get(locked.url + "/health").status_code == CLIENT.head(locked.url + "/ready").status_code == 200
    assert CLIENT.get(locked.url + "/health/").status_code == 200


def test_no_key_is_in_metrics_plan_errors_or_printed_settings(locked: Live) -> None:
    said = repr(locked.service.settings) + str(locked.service.settings.model_dump_json())
    for path in ("/metrics", "/plan", "/slots", "/nowhere", "/openapi.json", "/health"):
        said += CLIENT.get(locked.url + path, headers=bearer(KEYS[0])).text
    assert not any(key in said for key in KEYS)


@pytest.mark.parametrize("value", ["short", "with space in it", "good-key-1,bad", "@/no/such/file", "ключключключ"])
def test_a_bad_key_is_one_line_that_does_not_repeat_it(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["serve", "--api-key", value]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--api-key" in said
    assert value.startswith("@") or not any(part in said for part in value.split(","))


def test_only_the_configured_origin_may_call_and_never_with_credentials(locked: Live) -> None:
    asked = "authorization,content-type,openai-organization,traceparent,x-stainless-os,x-stainless-retry-count"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    ours = CLIENT.options(locked.url + "/generate", headers={"Origin": "https://app.example"} | preflight)
    assert ours.status_code == 200 and ours.headers["access-control-allow-origin"] == "https://app.example"
    assert ours.headers["access-control-allow-headers"] == asked, "OpenAI's client and tracers send their own"
    preflight["Access-Control-Request-Private-Network"] = "true"
    local = CLIENT.options(locked.url + "/generate", headers={"Origin": "https://app.example"} | preflight)
    assert local.status_code == 200 and local.headers["access-control-allow-private-network"] == "true"
    theirs = CLIENT.options(locked.url + "/generate", headers={"Origin": "https://evil.example"} | preflight)
    assert "access-control-allow-origin" not in theirs.headers
    assert theirs.status_code == 403 and theirs.json()["error"]["code"] == "origin_refused"
    assert "origin" in theirs.json()["error"]["message"]
    answer = CLIENT.get(locked.url + "/health", headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in ours.headers.keys() | answer.headers.keys()


def test_without_a_setting_no_origin_may_call(live: Live) -> None:
    answer = CLIENT.get(live.url + "/health", headers={"Origin": "https://app.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_any_origin_never_means_credentials(rand: Path) -> None:
    with serve(model=str(rand), slots=1, cors_origin="*") as live:
        answer = CLIENT.get(live.url + "/health", headers={"Origin": "https://any.example", "Cookie": "a=b"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def raw(live: Live, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back when these bytes are sent, until the server closes."""
    host, port = live.url.removeprefix("http://").split(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=20) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause_s)
            while chunk := client.recv(65536):
                got += chunk
        except ConnectionError:
            pass
        return got


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % at for at in range(5000)) + b"\r\n",
        b"GET /health?" + b"q" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Endless: " + b"a" * 3_000_000,
    ],
)
def test_a_head_that_is_too_long_is_refused_in_the_error_format(live: Live, head: bytes) -> None:
    answer = raw(live, head)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")  # the kernel may drop it with the unread rest
    assert CLIENT.get(live.url + "/health").status_code == 200
    assert CLIENT.get(live.url + "/health", headers={"X-Long": "a" * 20_000}).status_code == 200


def test_bytes_that_are_not_http_get_a_400_in_the_error_format(live: Live) -> None:
    def counted() -> float:
        line = next(line for line in CLIENT.get(live.url + "/metrics").text.splitlines() if 'code="bad_head"' in line)
        return float(line.split()[-1])

    before = counted()
    head, _, body = raw(live, b"\x16\x03\x01\x02\x00nonsense\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "bad_head"
    assert counted() == before + 1


def test_heads_and_bodies_that_never_end_time_out(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    monkeypatch.setattr(body_room, "BODY_S", 0.3)
    assert raw(live, b"GET /health HTTP/1.1\r\nHost").startswith(b"HTTP/1.1 408 ")
    assert raw(live) == b""
    post = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    assert raw(live, post).startswith(b"HTTP/1.1 408 ")
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    assert raw(live, one, one, b"GET /he", pause_s=0.1).count(b"HTTP/1.1 200 ") == 2  # a later head has a limit, too


def test_tls_works_and_a_bad_certificate_is_a_one_line_error(
    rand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost".split()
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    with serve(model=str(rand), slots=1, ssl_certfile=certificate, ssl_keyfile=key) as live:
        trusted = httpx.Client(verify=ssl.create_default_context(cafile=str(certificate)))
        url = live.url.replace("http://", "https://")
        assert trusted.get(url + "/health").status_code == 200
        with trusted.stream("POST", url + "/generate", json={"prompt": "x", "max_tokens": 3}) as response:
            assert b"".join(response.iter_raw()).endswith(b"data: [DONE]\n\n")
    assert main(["serve", "--model", str(rand), "--ssl-certfile", str(rand / "config.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
