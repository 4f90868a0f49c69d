"""The load test measured against a fake server on a real socket, whose gaps, tokens and failures are known."""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import re
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

SCRIPT = Path(__file__).parents[1] / "deploy" / "load_test.py"
spec = importlib.util.spec_from_file_location("load_test", SCRIPT)
assert spec and spec.loader
lt = importlib.util.module_from_spec(spec)
sys.modules["load_test"] = lt
spec.loader.exec_module(lt)

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 40}


# The fake server


@dataclass
class FakeServer:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    dropped: int = 0

    async def idle(self) -> None:
        """Waits until what the client dropped has reached the server."""
        async with asyncio.timeout(5):
            while self.running:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[FakeServer]:
    """Serve one request a connection with `answer`; a socket that the client closes before the answer is dropped."""
    fake = FakeServer()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            models = b'{"object":"list","data":[{"id":"fake-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
            writer.close()
            return
        fake.arrivals.append(asyncio.get_running_loop().time())
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length
        body = json.loads(await reader.readexactly(int(length[1])))
        fake.bodies.append(body)
        fake.running += 1
        fake.most_running = max(fake.most_running, fake.running)
        gone = asyncio.create_task(reader.read(1))
        work = asyncio.ensure_future(answer(body, writer))
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        fake.dropped += not work.done() or work.exception() is not None  # the write after the drop may fail first
        fake.running -= 1
        work.cancel()
        gone.cancel()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


def stream(*steps: float | bytes, end: bool = True) -> Answer:
    """Bytes are one HTTP chunk each, numbers are seconds to wait; without `end` the socket closes in mid-body."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        writer.write(HEAD)
        due = loop.time()
        for step in steps:
            if isinstance(step, bytes):
                writer.write(b"%x\r\n%b\r\n" % (len(step), step))
                await writer.drain()
            else:
                due += step  # from due time to due time, so that waiting late does not add up
                await asyncio.sleep(max(0.0, due - loop.time()))
        writer.write(b"0\r\n\r\n" if end else b"")
        await writer.drain()

    return answer


def plain(head: bytes, body: bytes = b"") -> Answer:
    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    return answer


def in_turn(*answers: Answer) -> Answer:
    """The first request gets the first answer, and so on."""
    left = iter(answers)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await next(left)(body, writer)

    return answer


def sse(frame: object) -> bytes:
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def token(text: str = " tok", count: int = 4) -> bytes:
    return sse({"type": "token", "index": 0, "text": text, "token_ids": [5] * count})


def native_end(usage: dict[str, int] | None = USAGE, reason: str = "length") -> bytes:
    return sse({"type": "end", "index": 0, "finish_reason": reason} | ({"usage": usage} if usage else {})) + DONE


START = sse({"type": "start", "id": "r", "slot": 0, "prompt_tokens": 7})
QUICK = stream(START, token(), native_end())


def shape(endpoint: str) -> tuple[bytes, bytes, bytes]:
    """First frame without text, a text frame, and the end with usage, as the endpoint writes them."""
    if endpoint == "/generate":
        return START, token(), native_end()
    usage = sse({"choices": [], "usage": USAGE}) + DONE
    if endpoint == "/v1/completions":
        end = sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}) + usage
        return sse({"choices": [{"index": 0, "text": ""}]}), sse({"choices": [{"index": 0, "text": " tok"}]}), end
    end = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + usage
    role = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    return role, sse({"choices": [{"index": 0, "delta": {"content": " tok"}}]}), end


def gapped(endpoint: str) -> Answer:
    """An empty frame at once, text after 150 ms, then nine times 100 ms: 10 chunks of 4 tokens."""
    first, text, end = shape(endpoint)
    rest: list[float | bytes] = [0.1, text] * 9
    return stream(first, 0.15, text, *rest, end)


# The load test


def arguments(url: str, *flags: str) -> argparse.Namespace:
    return lt.parse_args(["--url", url, "--quiet", *flags])  # type: ignore[no-any-return]


def measure(answer: Answer, *flags: str) -> tuple[dict[str, Any], FakeServer]:
    async def go() -> tuple[dict[str, Any], FakeServer]:
        async with fake_server(answer) as fake:
            load = await lt.run_load(arguments(fake.url, *flags))
            await fake.idle()
            return lt.summarise(load), fake

    return asyncio.run(go())


async def run_script(*flags: str) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *flags, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


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


def test_the_script_alone_measures_the_same_and_finds_the_model_by_itself() -> None:
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
    assert report["config"]["prompt_tokens"] == "128" and "api_key" not in report["config"]
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
        "aborted": 0,
        "unfinished": 0,
        "peak_concurrency": 1,
    }
    assert report["tokens"]["output"] == 40  # of the one that ended in order


def test_an_end_followed_by_a_broken_connection_is_no_failure() -> None:
    report, _ = measure(stream(START, token(), native_end(), end=False), "--requests", "1")
    assert report["requests"]["completed"] == 1 and report["failures"] == {}


def test_exit_code_is_1_when_every_request_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    code = lt.main(["--url", "http://127.0.0.1:9", "--requests", "2", "--quiet", "--json", str(file)])
    assert code == 1
    assert json.loads(file.read_text())["failures"]["connect_error"]["count"] == 2
    assert "connect_error 2" in capsys.readouterr().out
    assert lt.main(["--url", "http://127.0.0.1:9", "--endpoint", "/v1/completions"]) == 1


def test_abort_fraction_1_closes_every_socket_before_the_first_token_and_in_mid_stream() -> None:
    tokens: list[float | bytes] = [0.01, token()] * 200
    slow = stream(0.03, START, *tokens)
    flags = ("--requests", "16", "--concurrency", "8", "--abort-fraction", "1", "--max-tokens", "16")
    report, fake = measure(slow, *flags)
    assert fake.dropped == len(fake.bodies) == 16
    assert report["requests"]["aborted"] == 16 and report["requests"]["failed"] == 0
    assert set(report["failures"]) == {"aborted"}
    delays = {lt.make_drop(1.0, random.Random(i), 16).delay < 1 for i in range(20)}
    assert delays == {True, False}
    assert all(lt.make_drop(0.0, random.Random(i), 16) is None for i in range(20))


def test_a_dropped_share_is_near_its_fraction() -> None:
    drops = sum(lt.make_drop(0.3, random.Random(i), 64) is not None for i in range(2000))
    assert 500 < drops < 700


@pytest.mark.parametrize("lengths", ["32:256", "lognormal:5,0.8", "lognormal:5,0.8,300", "17"])
def test_lengths_and_prompts_are_reproduced_by_the_seed_alone(lengths: str) -> None:
    def bodies(seed: str, order: list[int]) -> dict[int, Any]:
        flags = ("--prompt-tokens", lengths, "--max-tokens", lengths, "--seed", seed)
        args = arguments("http://h", *flags)
        return {i: lt.make_body(args, lt.request_rng(args, i), i) for i in order}

    order = list(range(300))
    once, again, other = bodies("1", order), bodies("1", order[::-1]), bodies("2", order)
    assert once == again and once != other
    sizes = [body["max_tokens"] for body in once.values()]
    words = [len(body["prompt"].split()) for body in once.values()]
    if lengths == "17":
        assert set(sizes) == set(words) == {17}
    elif lengths == "32:256":
        assert 32 <= min(sizes) <= max(sizes) <= 256 and 130 < statistics.mean(sizes) < 158
    else:
        assert 130 < statistics.median(sizes) < 170 and min(sizes) >= 1
        assert (max(sizes) == 300) == ("300" in lengths)


def test_prompt_ids_have_the_exact_length_and_share_the_prefix() -> None:
    flags = ("--prompt-ids", "50", "--prompt-tokens", "20", "--shared-prefix", "8", "--requests", "40", "--ignore-eos")
    report, fake = measure(QUICK, *flags)
    prompts = [body["prompt"] for body in fake.bodies]
    assert report["requests"]["completed"] == 40
    assert {len(prompt) for prompt in prompts} == {20}
    assert {number for prompt in prompts for number in prompt} <= set(range(2, 50))
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 40
    assert all(body["ignore_eos"] and "model" not in body for body in fake.bodies)


def test_open_loop_arrivals_follow_the_rate_whatever_the_server_does() -> None:
    slow = stream(START, 0.4, token(), native_end())
    flags = ("--rate", "20", "--requests", "16", "--seed", "3")
    report, fake = measure(slow, *flags)
    due = list(lt.arrivals(arguments("http://h", *flags)))
    assert due[-1] == pytest.approx(16 / 20)
    for request, second in zip(report["per_request"], due, strict=True):
        assert request["sent_ms"] - request["client_wait_ms"] == pytest.approx(second * 1e3, abs=0.01)
    lags = [seen - want for seen, want in zip(fake.arrivals, due, strict=True)]
    assert statistics.median(abs(lag - statistics.median(lags)) for lag in lags) < 0.1
    assert report["requests"]["completed"] == 16 and report["wall_s"] < 3  # one by one: over 6 s
    assert report["requests"]["peak_concurrency"] > 4


@pytest.mark.parametrize(("burstiness", "variation"), [("1", 1.0), ("4", 0.5), ("0.25", 2.0)])
def test_gaps_are_gamma_with_the_burstiness_as_shape(burstiness: str, variation: float) -> None:
    due = [0.0, *lt.arrivals(arguments("http://h", "--rate", "20", "--duration", "500", "--burstiness", burstiness))]
    gaps = numpy.diff(due)
    assert len(gaps) == pytest.approx(10_000, rel=0.1) and due[-1] < 500
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_waiting_for_max_concurrency_is_kept_out_of_the_latencies() -> None:
    slow = stream(START, 0.1, token(), native_end())
    report, fake = measure(slow, "--rate", "200", "--requests", "5", "--max-concurrency", "1")
    assert fake.most_running == report["requests"]["peak_concurrency"] == 1
    assert report["latency_ms"]["ttft"]["max"] < 250
    assert report["latency_ms"]["client_wait"]["max"] > 350


def test_closed_loop_keeps_n_requests_under_way_until_the_duration_is_over() -> None:
    slow = stream(START, 0.1, token(), native_end())
    report, fake = measure(slow, "--concurrency", "3", "--duration", "0.35")
    assert fake.most_running == report["requests"]["peak_concurrency"] == 3
    assert 3 < report["requests"]["completed"] == len(fake.bodies) <= 12  # four rounds; the last one may finish
    assert all(r["sent_ms"] - r["client_wait_ms"] < 350 for r in report["per_request"])
    assert report["wall_s"] > 0.35 and report["requests"]["unfinished"] == 0


def test_the_connection_pool_does_not_cap_the_concurrency() -> None:
    async def go() -> dict[str, Any]:
        everyone = asyncio.Barrier(101)  # httpx allows 100 connections unless told otherwise

        async def together(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            await everyone.wait()
            await QUICK(body, writer)

        async with fake_server(together) as fake:
            flags = ("--concurrency", "101", "--requests", "101", "--timeout", "30")
            return lt.summarise(await lt.run_load(arguments(fake.url, *flags)))  # type: ignore[no-any-return]

    assert asyncio.run(go())["requests"]["completed"] == 101


def test_warmup_is_sent_but_not_measured() -> None:
    report, fake = measure(QUICK, "--requests", "3", "--warmup", "2", "--abort-fraction", "0")
    assert len(fake.bodies) == 5 and report["requests"]["sent"] == 3
    assert len({body["prompt"] for body in fake.bodies}) == 5


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_percentiles_agree_with_numpy_and_statistics(size: int) -> None:
    values = [random.Random(size + i).expovariate(1) for i in range(size)]
    for q in (0, 50, 90, 95, 99, 100):
        assert lt.percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)))
    assert lt.percentile(values, 50) == pytest.approx(statistics.median(values))
    if size > 1:
        assert lt.percentile(values, 95) == pytest.approx(statistics.quantiles(values, n=100, method="inclusive")[94])
    assert lt.percentile([], 50) is None
    figures = lt.spread(values)
    assert figures["mean"] == pytest.approx(statistics.mean(values) * 1e3, abs=1e-3)
    assert figures["std"] == pytest.approx(statistics.pstdev(values) * 1e3, abs=1e-3)


def test_text_with_unicode_line_ends_arrives_intact_however_it_is_chunked() -> None:
    text = "a\u2028b\u0085c\u2029d\x0be\U0001f642"
    frame = json.dumps({"type": "token", "text": text, "token_ids": [1]}, ensure_ascii=False).encode()
    wire = b": waiting position=2\r\n\r\ndata: " + frame + b"\r\n\r\ndata:" + frame + b"\r\rdata: " + frame + b"\n\n"
    pieces = [wire[i : i + 3] for i in range(0, len(wire), 3)]

    async def go() -> Any:
        async with fake_server(stream(*pieces, native_end())) as fake, httpx.AsyncClient() as client:
            request = client.build_request("POST", fake.url + "/generate", json={})
            return await lt.transfer(client, request, None, 5.0)

    got = asyncio.run(go())
    frames = [json.loads(payload) for _, payload in lt.payloads(got.stamps, got.chunks) if payload != b"[DONE]"]
    assert [frame["text"] for frame in frames if frame["type"] == "token"] == [text] * 3
    assert frames[-1]["usage"] == USAGE


def test_a_frame_is_stamped_by_the_chunk_that_completes_it() -> None:
    wire = b"data: 1\n\ndata: 22\n\ndata: 333\n\ndata: unfinished"
    for cut in range(1, len(wire) - 1):
        got = list(lt.payloads([1.0, 2.0], [wire[:cut], wire[cut:]]))
        assert [payload for _, payload in got] == [b"1", b"22", b"333"]
        assert [stamp for stamp, _ in got] == [1.0 if cut > end else 2.0 for end in (7, 17, 28)]


def test_goodput_counts_the_requests_that_met_every_limit() -> None:
    fast, slow = stream(START, token(), native_end()), stream(START, 0.4, token(), native_end())
    failed = stream(START)
    flags = ("--requests", "4", "--concurrency", "1", "--goodput", "ttft:300", "tpot:50", "e2el:2000")
    goodput = measure(in_turn(fast, slow, failed, fast), *flags)[0]["goodput"]
    assert goodput["limits_ms"] == {"ttft": 300.0, "tpot": 50.0, "e2el": 2000.0}
    assert goodput["good"] == 2 and goodput["slo_attainment"] == 0.5


def test_a_one_token_answer_has_no_tpot_and_meets_any_tpot_goal() -> None:
    one = stream(START, token("a", 1), native_end({"prompt_tokens": 7, "completion_tokens": 1}))
    report, _ = measure(one, "--requests", "1", "--goodput", "tpot:1")
    assert report["latency_ms"]["tpot"] == {"count": 0} and report["goodput"]["good"] == 1


def test_a_busy_or_late_client_warns_that_it_may_be_the_limit() -> None:
    load = lt.Load(arguments("http://h"))
    load.end, load.cpu_end = load.start + 10, load.cpu_start + 9
    assert any("90% of a core" in note for note in lt.summarise(load)["notes"])
    load.cpu_end = load.cpu_start + 5
    assert lt.summarise(load)["notes"] == []
    load.results = [lt.Result(i, "http_429", client_wait=0.3) for i in range(3)]
    assert any("300 ms late" in note for note in lt.summarise(load)["notes"])


def test_ctrl_c_prints_what_was_gathered_so_far() -> None:
    async def go() -> tuple[int | None, bytes, FakeServer]:
        answer = in_turn(QUICK, QUICK, stream(START, 30.0), stream(START, 30.0))
        async with fake_server(answer) as fake:
            flags = ("--url", fake.url, "--concurrency", "2", "--json", "-", "--quiet")
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


def test_the_script_needs_httpx_rich_and_the_standard_library_only() -> None:
    lines = re.findall(r"^ *(?:import|from) +(\w+)", SCRIPT.read_text(), flags=re.MULTILINE)
    assert set(lines) - sys.stdlib_module_names == {"httpx", "rich"}
    assert lines.count("httpx") == 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--rate 2 --concurrency 3", "exclude each other"),
        ("--requests 2 --duration 3", "exclude each other"),
        ("--prompt hi --prompt-ids 50", "exclude each other"),
        ("--max-concurrency 2", "needs --rate"),
        ("--rate inf", "above 0"),
        ("--concurrency 0", "at least 1"),
        ("--prompt-tokens 9:3", "smaller end first"),
        ("--prompt-tokens 0", "at least 1"),
        ("--max-tokens lognormal:5", "lognormal:MU,SIGMA"),
        ("--max-tokens lognormal:5,nan", "lognormal:MU,SIGMA"),
        ("--max-tokens 1:2:3", "a range"),
        ("--abort-fraction 1.5", "from 0 to 1"),
        ("--goodput latency:3", "ttft, tpot, e2el"),
        ("--endpoint /v2/talk", "/generate"),
        ("--model m", "OpenAI"),
        ("--json /no/such/folder/x", "no such folder"),
        ("--url ftp://h", "http://HOST:PORT"),
        ("--url http://h:99999", "http://HOST:PORT"),
        ("--extra [1]", "JSON object"),
        ('--extra {"temperature":NaN}', "--extra: not JSON"),
        ('--extra {"temperature":1e999}', "--extra: not JSON"),
        ('--extra {"stop":"\\ud800"}', "--extra: not JSON"),
        ("--prompt \udcff", "--prompt: '\\udcff' cannot be sent"),
        ("--endpoint /v1/completions --model \udcff", "--model: '\\udcff' cannot be sent"),
        ("--api-key sch\xfcssel", "--api-key: 'sch\xfcssel' cannot be sent"),
    ],
)
def test_a_bad_argument_is_one_clear_line_and_exit_code_2(
    flags: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments("http://h", *flags.split())
    assert stop.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]
