"""The load test against a fake server: tokens by usage, latencies by frames, every failure by its kind."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import load_test
import pytest
from fake_server import (
    DONE,
    QUICK,
    SCRIPT,
    START,
    USAGE,
    Answer,
    FakeServer,
    fake_server,
    gapped,
    in_turn,
    measure,
    native_end,
    plain,
    run_script,
    sse,
    stream,
    token,
)
from measure.result import payloads
from measure.transfer import transfer


def assert_known_gaps(report: dict[str, Any]) -> None:
    latency = report["latency_ms"]
    assert report["tokens"]["output"] == 40
    assert report["tokens"]["frames"] == 10
    assert latency["itl"]["count"] == 9
    assert latency["itl"]["mean"] == pytest.approx(100, abs=5)
    assert 140 < latency["ttft"]["mean"] < 210  # the empty first frame came at once
    assert latency["e2e"]["mean"] - latency["ttft"]["mean"] == pytest.approx(900, abs=45)
    assert latency["tpot"]["mean"] == pytest.approx((latency["e2e"]["mean"] - latency["ttft"]["mean"]) / 39, abs=0.01)
    assert any("40 tokens came in 10 frames" in note for note in report["notes"])


@pytest.mark.parametrize("endpoint", ["/generate", "/v1/chat/completions"])
def test_tokens_come_from_usage_and_latencies_from_frames_with_text(endpoint: str) -> None:
    model = () if endpoint == "/generate" else ("--model", "m")
    report, _ = measure(gapped(endpoint), "--endpoint", endpoint, *model, "--requests", "1")
    assert_known_gaps(report)


def test_the_command_measures_the_same_and_asks_for_the_model() -> None:
    async def go() -> tuple[tuple[int, str, str], FakeServer]:
        async with fake_server(gapped("/v1/completions")) as fake:
            flags = ["--endpoint", "/v1/completions", "--requests", "1", "--json", "-", "--api-key", "k"]
            return await run_script("--url", fake.url, *flags), fake

    (code, out, err), fake = asyncio.run(go())
    assert code == 0, err
    report = json.loads(out)
    assert_known_gaps(report)
    assert fake.bodies[0]["model"] == "fake-model"
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}
    assert report["config"]["prompt_tokens"] == [128, 128] and "api_key" not in report["config"]
    assert "TTFT" in err and "output tokens/s" in err


def test_a_reply_without_usage_is_flagged_and_its_chunks_are_not_counted_as_tokens() -> None:
    report, _ = measure(stream(START, token(), token(), native_end(usage=None)), "--requests", "2")
    assert report["requests"]["completed"] == 2
    assert report["tokens"]["output"] == 0
    assert report["tokens"]["requests_without_usage"] == 2
    assert report["latency_ms"]["tpot"] == {"count": 0}
    assert any("without usage" in note for note in report["notes"])


def test_an_end_of_text_token_without_text_still_ends_the_clock() -> None:
    answer = stream(START, token("", 1), 0.05, token("a", 1), 0.1, token("", 1), 0.8, native_end())
    latency = measure(answer, "--requests", "1")[0]["latency_ms"]
    assert latency["ttft"]["mean"] > 45
    assert 50 < latency["e2e"]["mean"] - latency["ttft"]["mean"] < 500


async def close_at_once(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.close()


FAILURES: dict[str, tuple[str, Answer]] = {
    "error frame": ("error_frame", stream(START, token(), sse({"type": "error", "error": {"message": "boom"}}), DONE)),
    "openai error": ("error_frame", stream(sse({"error": {"message": "boom"}}), DONE)),
    "error then cut": ("error_frame", stream(START, sse({"type": "error", "error": {"message": "boom"}}), end=False)),
    "body ends early": ("cut_stream", stream(START, token())),
    "socket closes": ("cut_stream", stream(START, token(), end=False)),
    "half a frame": ("cut_stream", stream(START, token()[:20])),
    "deadline": ("finish_deadline", stream(START, token(), native_end(reason="deadline"))),
    "not JSON": ("bad_frame", stream(START, b"data: {nonsense\n\n", DONE)),
    "not an object": ("bad_frame", stream(b"data: [1]\n\n", DONE)),
    "one JSON reply": ("not_a_stream", stream(b'{"choices": []}')),
    "queue full": ("http_429", plain(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\n", b'{"error": {}}')),
    "draining": ("http_503", plain(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1.5\r\n")),
    "moved": ("http_307", plain(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /\r\n")),
    "no reply": ("no_reply", close_at_once),
    "silence": ("timeout", stream(START, 5.0)),
}


def test_each_kind_of_failure_is_counted_apart_and_none_is_retried() -> None:
    answers = [QUICK, *(answer for _, answer in FAILURES.values())]
    flags = ("--requests", str(len(answers)), "--concurrency", "1", "--timeout", "1")
    report, fake = measure(in_turn(*answers), *flags)
    expected = ["ok", *(kind for kind, _ in FAILURES.values())]
    assert [request["kind"] for request in report["per_request"]] == expected
    assert {kind: failure["count"] for kind, failure in report["failures"].items()} == {
        kind: expected.count(kind) for kind in expected if kind != "ok"
    }
    assert report["failures"]["http_429"]["retry_after_s"] == {"count": 1, "min": 3.0, "max": 3.0}
    assert "boom" in report["failures"]["error_frame"]["example"]
    assert len(fake.bodies) == len(answers)
    assert report["requests"] == {
        "sent": len(answers),
        "completed": 1,
        "failed": len(FAILURES),
        "unfinished": 0,
        "peak_concurrency": 1,
    }
    assert report["tokens"]["output"] == 40  # of the completed one


def test_an_end_followed_by_a_broken_connection_is_no_failure() -> None:
    report, _ = measure(stream(START, token(), native_end(), end=False), "--requests", "1")
    assert report["requests"]["completed"] == 1 and report["failures"] == {}


def test_exit_code_is_1_when_every_request_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    code = load_test.main(["--url", "http://127.0.0.1:9", "--requests", "2", "--json", str(file)])
    assert code == 1
    assert json.loads(file.read_text())["failures"]["connect_error"]["count"] == 2
    assert "connect_error 2" in capsys.readouterr().out
    assert load_test.main(["--url", "http://127.0.0.1:9", "--endpoint", "/v1/completions"]) == 1


def test_text_with_unicode_line_ends_arrives_intact_however_it_is_chunked() -> None:
    text = "a\u2028b\u0085c\u2029d\x0be\U0001f642"
    frame = json.dumps({"type": "token", "text": text, "token_ids": [1]}, ensure_ascii=False).encode()
    wire = b": waiting position=2\r\n\r\ndata: " + frame + b"\r\n\r\ndata:" + frame + b"\r\rdata: " + frame + b"\n\n"
    pieces = [wire[i : i + 3] for i in range(0, len(wire), 3)]

    async def go() -> Any:
        async with fake_server(stream(*pieces, native_end())) as fake, httpx.AsyncClient() as client:
            request = client.build_request("POST", fake.url + "/generate", json={})
            return await transfer(client, request, 5.0)

    got = asyncio.run(go())
    frames = [json.loads(payload) for _, payload in payloads(got.stamps, got.chunks) if payload != b"[DONE]"]
    assert [frame["text"] for frame in frames if frame["type"] == "token"] == [text] * 3
    assert frames[-1]["usage"] == USAGE


def test_a_frame_is_stamped_by_the_chunk_that_completes_it() -> None:
    wire = b"data: 1\n\ndata: 22\n\ndata: 333\n\ndata: unfinished"
    for cut in range(1, len(wire) - 1):
        got = list(payloads([1.0, 2.0], [wire[:cut], wire[cut:]]))
        assert [payload for _, payload in got] == [b"1", b"22", b"333"]
        assert [stamp for stamp, _ in got] == [1.0 if cut > end else 2.0 for end in (7, 17, 28)]


def test_ctrl_c_prints_what_was_gathered_so_far() -> None:
    async def go() -> tuple[int | None, bytes, FakeServer]:
        answer = in_turn(QUICK, QUICK, stream(START, 30.0), stream(START, 30.0))
        async with fake_server(answer) as fake:
            flags = ("--url", fake.url, "--concurrency", "2", "--json", "-")
            pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *flags, stdout=pipe, stderr=null)
            async with asyncio.timeout(30):
                while len(fake.bodies) < 4:
                    await asyncio.sleep(0.02)
                process.send_signal(signal.SIGINT)
                out, _ = await process.communicate()
            await fake.idle()
            return process.returncode, out, fake

    code, out, fake = asyncio.run(go())
    report = json.loads(out)
    assert code == 130 and report["interrupted"]
    assert report["requests"]["completed"] == 2 and report["requests"]["unfinished"] == 2
    assert report["requests"]["failed"] == 0 and fake.dropped == 2
