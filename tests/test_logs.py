"""Logs: one line per event, escaped and truncated; the server runs on whatever happens to them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import CLIENT, Live, serve

from tokenteller.server.api.lifecycle import log_stats
from tokenteller.server.logs import Writer, json_line, plain_line, request_id

HOSTILE = [
    'x\n2026-11-29T00:00:00.000Z ERROR fake id="1"',
    "\r\x1b[2J\x1b]0;title\x07 \x9b31m",
    "\u2028\u2029\u0085 2026 ERROR fake",
    "é 猫 🙂 \ud800",
    "y" * 1_000_000,
]


def record(message: str = "event", error: Exception | None = None, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("tokenteller", logging.INFO, "", 0, message, (), error and (type(error), error, None))
    made.fields = fields
    return made


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_a_client_sends_forges_a_line_or_controls_a_terminal(text: str) -> None:
    plain, as_json = plain_line(record(text, path=text, user=text)), json_line(record(text, path=text, user=text))
    for line in (plain, as_json):
        assert line.isascii() and line.isprintable()
        assert len(line) < 10_000
    told = json.loads(as_json)
    assert told["event"][:5] == text[:5] and told["level"] == "info" and told["path"][:20] == text[:20]


def test_a_traceback_stays_behind_a_bar_whatever_its_message_says() -> None:
    error = ValueError("bad\n2026-11-29T00:00:00.000Z ERROR fake\n\x1b[31m")
    first, *rest = plain_line(record("it broke", error)).split("\n")
    assert first.endswith("it broke")
    assert rest and all(line.startswith("    | ") and line.isprintable() for line in rest)
    assert "ValueError: bad" in json.loads(json_line(record("it broke", error)))["exception"]


def test_every_request_is_one_line_with_both_ids_and_none_of_its_text(
    rand: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(model=str(rand), slots=2) as live, caplog.at_level(logging.INFO, "tokenteller"):
        body = {"prompt": "a private matter", "max_tokens": 8, "stream": False, "temperature": 0}
        headers = {"X-Request-Id": "theirs-1", "User-Agent": "private agent"}
        answer = CLIENT.post(live.url + "/generate", json=body, headers=headers)
        refused = CLIENT.post(
            live.url + "/generate", json=body | {"max_tokens": 10**6}, headers={"X-Request-Id": "a b"}
        )
        live.wait_idle()
    lines = [json.loads(json_line(record)) for record in caplog.records if record.name == "tokenteller"]
    served = next(line for line in lines if line["event"] == "request")
    assert served["id"] == answer.json()["id"] and served["request_id"] == "theirs-1"
    assert served["prompt_tokens"] == 16 and served["completion_tokens"] == 8 and served["reasons"] == "length"
    assert answer.headers["x-request-id"] == "theirs-1"
    http = next(line for line in lines if line["event"] == "http")
    assert http["status"] == 422 and http["code"] == "never_fits" and http["path"] == "/generate"
    assert refused.headers["x-request-id"].startswith("req-")  # the client's was not valid
    text = answer.json()["choices"][0]["text"]
    assert "private" not in json.dumps(lines) and text not in json.dumps(lines, ensure_ascii=False)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(write)


def test_a_sleeping_reader_costs_lines_but_no_time(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = Writer(write, plain_line)
    began = time.monotonic()
    for at in range(30_000):
        writer.emit(record("x" * 200, at=at))
    assert time.monotonic() - began < 20
    assert writer.dropped > 1000
    os.close(read)


def test_a_disk_that_is_full_for_a_while_tears_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    writes = [
        lambda d, b: os_write(d, b[:7]),
        lambda d, b: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    ]
    os_write = os.write
    monkeypatch.setattr(os, "write", lambda d, b: writes.pop(0)(d, b) if d == file and writes else os_write(d, b))
    writer = Writer(file, json_line)
    for at in range(3):
        writer.emit(record(at=at))
        writer.flush()
    assert writer.dropped == 1
    assert [json.loads(line)["at"] for line in path.read_text().splitlines()[1:]] == [1, 2]


def test_a_record_that_cannot_be_formatted_is_dropped(pipe: tuple[int, int]) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("not printable")

    writer = Writer(pipe[1], plain_line)
    writer.emit(record(what=Unprintable()))
    assert writer.dropped == 1


def test_stats_are_logged_under_load_and_not_when_idle(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> dict[str, Any]:
        telling = asyncio.create_task(log_stats(live.service, every_s=0.2))
        await asyncio.sleep(0.5)
        assert not caplog.records
        await asyncio.to_thread(live.text, "load", max_tokens=20, ignore_eos=True)
        while not (stats := [record for record in caplog.records if record.message == "stats"]):
            await asyncio.sleep(0.05)
        telling.cancel()
        told: dict[str, Any] = json.loads(json_line(stats[0]))
        return told

    with caplog.at_level(logging.INFO, "tokenteller"):
        told = asyncio.run(watch())
    assert told["tokens_per_s"] > 0 and told["running"] <= 1 and told["waiting"] == 0


def test_json_logs_are_json_from_the_first_line_to_the_last(rand: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "tokenteller.server",
        "serve",
        "--port",
        "0",
        "--model",
        str(rand),
        "--log-format",
        "json",
    ]
    with open(path, "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as popen:
        try:
            while '"ready"' not in path.read_text():
                assert popen.poll() is None
                time.sleep(0.05)
            url = json.loads(path.read_text().splitlines()[-1])["url"]
            CLIENT.post(url + "/generate", json={"prompt": HOSTILE[0], "max_tokens": 3, "stream": False})
            CLIENT.post(url + "/%0a%1b", content=b"{", headers={"X-Request-Id": "two words"})
            popen.terminate()
            assert popen.wait(20) == 0
        finally:
            popen.kill()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["plan", "ready", "request", "http"]
    assert lines[-1]["path"] == "/\n\x1b"


def test_the_request_id_of_the_context_is_added() -> None:
    token = request_id.set("ctx-1")
    assert json.loads(json_line(record()))["request_id"] == "ctx-1"
    request_id.reset(token)
