"""What the load test sends and when, how it counts, and what its arguments may be."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import sys
from typing import Any

import numpy
import pytest
from fake_server import QUICK, SCRIPT, START, arguments, fake_server, in_turn, measure, native_end, stream, token
from measure.figures import spread, summarise
from measure.load import Load, run_load
from measure.result import Result
from measure.workload import arrivals, make_body


@pytest.mark.parametrize("lengths", ["32:256", "17"])
def test_lengths_and_prompts_are_reproduced_by_the_seed_alone(lengths: str) -> None:
    def bodies(seed: str, order: list[int]) -> dict[int, Any]:
        flags = ("--prompt-tokens", lengths, "--max-tokens", lengths, "--seed", seed)
        args = arguments("http://h", *flags)
        return {i: make_body(args, i) for i in order}

    order = list(range(300))
    once, again, other = bodies("1", order), bodies("1", order[::-1]), bodies("2", order)
    assert once == again and once != other
    sizes = [body["max_tokens"] for body in once.values()]
    words = [len(body["prompt"].split()) for body in once.values()]
    if lengths == "17":
        assert set(sizes) == set(words) == {17}
    else:
        assert 32 <= min(sizes) <= max(sizes) <= 256 and 130 < statistics.mean(sizes) < 158


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
    due = list(arrivals(arguments("http://h", *flags)))
    assert due[-1] == pytest.approx(16 / 20)
    for request, second in zip(report["per_request"], due, strict=True):
        assert request["sent_ms"] - request["client_wait_ms"] == pytest.approx(second * 1e3, abs=0.01)
    lags = [seen - want for seen, want in zip(fake.arrivals, due, strict=True)]
    assert statistics.median(abs(lag - statistics.median(lags)) for lag in lags) < 0.1
    assert report["requests"]["completed"] == 16 and report["wall_s"] < 3  # one by one: over 6 s
    assert report["requests"]["peak_concurrency"] > 4


def test_gaps_of_an_open_loop_are_exponential() -> None:
    due = [0.0, *arrivals(arguments("http://h", "--rate", "20", "--duration", "500"))]
    gaps = numpy.diff(due)
    assert len(gaps) == pytest.approx(10_000, rel=0.1) and due[-1] < 500
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.1)


def test_closed_loop_keeps_n_requests_under_way_until_the_duration_is_over() -> None:
    slow = stream(START, 0.1, token(), native_end())
    report, fake = measure(slow, "--concurrency", "3", "--duration", "0.35")
    assert fake.peak == report["requests"]["peak_concurrency"] == 3
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
            return summarise(await run_load(arguments(fake.url, *flags)))

    assert asyncio.run(go())["requests"]["completed"] == 101


def test_warmup_is_sent_but_not_measured() -> None:
    report, fake = measure(QUICK, "--requests", "3", "--warmup", "2")
    assert len(fake.bodies) == 5 and report["requests"]["sent"] == 3
    assert len({body["prompt"] for body in fake.bodies}) == 5


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_spreads_agree_with_the_statistics_module(size: int) -> None:
    values = [random.Random(size + i).expovariate(1) for i in range(size)]
    figures = spread(values)
    assert figures["count"] == size and spread([]) == {"count": 0}
    expected = {"mean": statistics.mean(values), "std": statistics.pstdev(values), "max": max(values)}
    expected["median"] = statistics.median(values)
    if size > 1:
        percentiles = statistics.quantiles(values, n=100, method="inclusive")
        expected |= {f"p{q}": percentiles[q - 1] for q in (90, 95, 99)}
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value * 1e3, abs=1e-3), name


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
    load = Load(arguments("http://h"))
    load.end, load.cpu_end = load.start + 10, load.cpu_start + 9
    assert any("90% of a core" in note for note in summarise(load)["notes"])
    load.cpu_end = load.cpu_start + 5
    assert summarise(load)["notes"] == []
    load.results = [Result(i, "http_429", client_wait=0.3) for i in range(3)]
    assert any("300 ms late" in note for note in summarise(load)["notes"])


def test_the_load_test_needs_httpx_numpy_and_rich_only() -> None:
    files = [SCRIPT, *SCRIPT.parent.glob("measure/*.py")]
    text = "\n".join(file.read_text() for file in files)
    found = set(re.findall(r"^ *(?:import|from) +(\w+)", text, flags=re.MULTILINE))
    assert found - sys.stdlib_module_names == {"httpx", "measure", "numpy", "rich"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rate 2 --concurrency 3", "not allowed with argument"),
        ("--requests 2 --duration 3", "not allowed with argument"),
        ("--rate inf", "above 0"),
        ("--concurrency 0", "at least 1"),
        ("--prompt-tokens 9:3", "a range from small to large"),
        ("--prompt-tokens 0", "at least 1"),
        ("--max-tokens 1:2:3", "a range"),
        ("--max-tokens few", "a count"),
        ("--prompt-ids 50 --endpoint /v1/chat/completions", "chat takes only text"),
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
        ("--endpoint /v1/completions --model \udcff", "--model: '\\udcff' cannot be sent"),
        ("--api-key sch\xfcssel", "--api-key: 'sch\xfcssel' cannot be sent"),
    ],
)
def test_a_bad_argument_is_one_clear_line_and_exit_code_2(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments("http://h", *flags.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
