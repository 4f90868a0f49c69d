"""Faults seen in other servers: numbers, fields, sampling, admission, leaks. Numbered as in the report.

Text and streams are in test_faults_text, sockets in test_sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import tape
from live import CLIENT, Live, joined, parse_sse, serve

Body = dict[str, Any]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The tape of digits with a context of 64."""
    script = "0123456789" * 6 + "012"
    with serve(model=str(tape(tmp_path_factory.mktemp("tape") / "tape", script)), slots=4) as server:
        yield server


@pytest.fixture(autouse=True)
def _sound_afterwards(digits: Live, live: Live) -> Iterator[None]:
    """After every case both servers answer correctly and have no open stream."""
    yield
    assert digits.text("x", max_tokens=3, temperature=0) == "012"
    for server in (digits, live):
        server.wait_idle()
        assert len(server.service.streams) == 0


def at_once(url: str, bodies: list[Body], path: str = "/generate") -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            return list(await asyncio.gather(*(client.post(url + path, json=body) for body in bodies)))

    return asyncio.run(ask())


def first_text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


# 4 Ways out


def test_33_disconnects_during_a_long_prefill_cost_no_more_than_a_chunk(rand: Path) -> None:
    with serve(0.002, model=str(rand), prefill_chunk=16) as live:
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(live.url + "/generate", json={"prompt": [7] * 230, "stream": False}, timeout=0.004)
        live.wait_idle()
        assert live.generate("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert prompt_tokens(live) <= 5 * 230 + 1


def prompt_tokens(live: Live) -> float:
    lines = CLIENT.get(live.url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))


def test_41_no_kind_of_failure_loses_a_slot(digits: Live) -> None:
    kinds: list[tuple[Body, int]] = [
        ({"prompt": [1] * 65}, 422),
        ({"prompt": "x", "stop": ""}, 422),
        ({"prompt": [264]}, 422),
        ({"prompt": "x", "regex": "("}, 400),
        ({"prompt": "x", "grammar": 'start: "a" start', "stream": False}, 400),
    ]
    for body, status in kinds:
        assert {response.status_code for response in at_once(digits.url, [body] * 40)} == {status}
    for response in at_once(
        digits.url, [{"messages": [{"role": "user", "content": "x"}]}] * 40, "/v1/chat/completions"
    ):
        assert response.status_code == 400 and "template" in response.json()["error"]["message"]
    slots = digits.wait_idle()["slots"]
    assert sum(slot["state"] == "running" for slot in slots) == 0
    answers = at_once(digits.url, [{"prompt": "x", "max_tokens": 60, "temperature": 0, "stream": False}] * 4)
    assert [first_text(answer) for answer in answers] == ["0123456789" * 6] * 4


# 5 Numbers and limits


@pytest.mark.parametrize(("path", "status"), [("/generate", 422), ("/v1/completions", 400)])
@pytest.mark.parametrize("value", [-1, -5, 0, True, "10", 10.0, 10.5])
def test_43_53_max_tokens_is_a_positive_integer(digits: Live, path: str, status: int, value: Any) -> None:
    refused = digits.post(path, prompt="x", max_tokens=value)
    assert refused.status_code == status and refused.json()["error"]["param"] == "max_tokens"


def test_43_no_max_tokens_is_the_documented_default(digits: Live) -> None:
    for absent in ({}, {"max_tokens": None}):
        assert digits.generate("x", temperature=0, **absent)["usage"]["completion_tokens"] == 63
        short = digits.post("/v1/completions", prompt="x", temperature=0, **absent).json()
        assert short["usage"]["completion_tokens"] == 16 and short["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_45_usage_counts_every_token(digits: Live, count: int) -> None:
    body: Body = {"max_tokens": count, "temperature": 0}
    whole = digits.post("/v1/completions", prompt="xy", **body).json()
    assert whole["choices"][0]["text"] == "123456"[:count]
    assert whole["usage"]["completion_tokens"] == count and whole["usage"]["total_tokens"] == count + 2
    streamed = digits.stream("xy", "/v1/completions", **body, stream_options={"include_usage": True})
    assert streamed[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(("prompt", "count"), [(60, 4), (63, 1), (1, 63), (32, 32)])
def test_47_the_context_is_filled_to_the_last_position_in_order(digits: Live, prompt: int, count: int) -> None:
    body: Body = {"max_tokens": count, "temperature": 0}
    script = "0123456789" * 6 + "012"
    assert digits.text([1] * prompt, **body) == script[prompt - 1 :][:count]
    over = digits.post(prompt=[1] * prompt, max_tokens=count + 1)
    assert over.status_code == 422 and over.json()["error"]["max_tokens_that_fits"] == count


@pytest.mark.parametrize("ids", [[-1], [264], [2**40], [1.5], [True], ["1"], [[1]], [None], [65, None]])
def test_49_a_token_id_is_an_integer_inside_the_vocabulary(digits: Live, ids: list[Any]) -> None:
    refused = digits.post(prompt=ids)
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "prompt"
    assert digits.text([263], max_tokens=2, temperature=0) == "01"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "max_tokens"]
)
def test_51_numbers_are_finite(digits: Live, field: str, number: str) -> None:
    for path in ("/generate", "/v1/completions"):
        raw = f'{{"prompt": "x", "{field}": {number}}}'.encode()
        response = CLIENT.post(digits.url + path, content=raw)
        assert response.status_code in (400, 422) and response.json()["error"]["message"]


@pytest.mark.parametrize("change", [{"temperature": "hot"}, {"stream": "false"}, {"stop": 5}, {"temperature": True}])
def test_53_strings_and_booleans_are_not_numbers(digits: Live, change: Body) -> None:
    assert digits.post(prompt="x", **change).status_code == 422
    assert digits.post("/v1/completions", prompt="x", **change).status_code == 400


# 6 Bodies and fields


def test_55_a_nul_does_not_truncate_the_prompt(digits: Live) -> None:
    assert digits.generate("ab\x00cd", max_tokens=1)["usage"]["prompt_tokens"] == 5


def test_59_generate_refuses_misspelt_fields_and_every_endpoint_known_unsupported_ones(digits: Live) -> None:
    assert "max_token" in digits.post(prompt="x", max_token=4).json()["error"]["message"]
    assert digits.post("/v1/completions", prompt="x", max_token=4).status_code == 200
    for field, value in (("best_of", 2), ("suffix", "x"), ("use_beam_search", True), ("skip_special_tokens", False)):
        refused = digits.post("/v1/completions", prompt="x", **{field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


# 7 Sampling


def test_67_zero_and_tiny_temperatures_are_the_argmax_whatever_the_seed(live: Live) -> None:
    greedy = live.text("tiny", max_tokens=20, temperature=0, ignore_eos=True)
    for temperature in (0, 1e-8):
        for seed in range(5):
            assert live.text("tiny", max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True) == greedy
    for temperature in (1e-4, 1e-2):
        assert live.text("tiny", max_tokens=20, temperature=temperature, seed=1, ignore_eos=True)


def test_69_top_k_means_what_is_documented(live: Live) -> None:
    body: Body = {"max_tokens": 12, "seed": 3, "temperature": 1.5, "ignore_eos": True}
    off = live.text("top", **body)
    for value in (0, -1, 264, 10_000):
        assert live.text("top", **body, top_k=value) == off
    assert live.text("top", **body, top_k=1) == live.text("top", max_tokens=12, temperature=0, ignore_eos=True)
    for value in (-2, 2.5, "5", True):
        assert live.post(prompt="top", top_k=value).status_code == 422


def test_71_ties_go_to_the_lowest_id_alone_and_in_a_crowd(digits: Live) -> None:
    tied: Body = {"prompt": "x", "max_tokens": 1, "temperature": 0, "stream": False}
    tied["logit_bias"] = {str(ord("0")): -100, str(ord("x")): -100}  # all others are equal on the tape
    answers = at_once(digits.url, [tied] * 12 + [tied | {"temperature": 1, "top_k": 1}] * 12)
    assert {answer.json()["choices"][0]["token_ids"][0] for answer in answers} == {0}


def test_73_a_repetition_penalty_makes_repeats_rarer(live: Live) -> None:
    body: Body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = live.text("again", **body)
    assert live.text("again", **body, repetition_penalty=1.0) == plain
    ids = live.generate("again", **body, repetition_penalty=100.0)["choices"][0]["token_ids"]
    assert len(set(ids)) == 40 and not set(ids) & set(b"again")
    for value in (0, -1, 101, 5e-324):  # so small a divisor would make a logit infinite
        assert live.post(prompt="x", repetition_penalty=value).status_code == 422


def test_75_equal_seeds_are_equal_texts_whatever_slot(live: Live) -> None:
    body: Body = {"prompt": "seed", "max_tokens": 40, "seed": 11, "temperature": 1.3, "stream": False}
    texts = {first_text(answer) for answer in at_once(live.url, [body] * 6)}
    assert texts == {live.text("seed", max_tokens=40, seed=11, temperature=1.3)}


def test_77_no_seed_is_fresh_randomness_also_after_a_restart(live: Live, rand: Path) -> None:
    body: Body = {"prompt": "fresh", "max_tokens": 64, "temperature": 1, "stream": False}
    texts = [first_text(answer) for answer in at_once(live.url, [body] * 8)]
    with serve(model=str(rand), slots=2) as again:
        texts += [first_text(answer) for answer in at_once(again.url, [body] * 2)]
    assert len(set(texts)) == 10


# 8 One request's output depends on nothing but the request


def test_83_nothing_of_a_slots_former_request_remains(rand: Path) -> None:
    body: Body = {"max_tokens": 12, "seed": 1, "logprobs": 5, "ignore_eos": True, "cache_prefix": False}
    with serve(0.002, model=str(rand), slots=1) as server:
        fresh = server.generate("abc", **body)["choices"]
        for length in (200, 3, 77):
            server.text([9] * length, max_tokens=20, ignore_eos=True)
            with pytest.raises(httpx.ReadTimeout):
                stranger = {"prompt": [8] * length, "max_tokens": 40, "ignore_eos": True, "stream": False}
                httpx.post(server.url + "/generate", json=stranger, timeout=0.01)
            server.wait_idle()
            assert server.generate("abc", **body)["choices"] == fresh


# 9 Admission


def test_97_a_pool_for_two_and_a_half_sequences_serves_twenty_correctly(rand: Path, live: Live) -> None:
    rows = 2 * 2 * 2 * 16 * 4 * 250  # K and V x layers x kv heads x head_dim x fp32 x rows of one sequence
    lengths = [(5 + 11 * number) % 200 for number in range(20)]
    bodies: list[Body] = [
        {"prompt": [number + 1] * (length + 1), "max_tokens": 30, "seed": number, "stream": False, "ignore_eos": True}
        for number, length in enumerate(lengths)
    ]
    alone = [live.generate(**{k: v for k, v in body.items() if k != "stream"})["choices"][0]["text"] for body in bodies]
    with serve(model=str(rand), slots=8, kv_memory=int(2.5 * rows)) as small:
        assert [first_text(answer) for answer in at_once(small.url, bodies)] == alone
        assert small.wait_idle()["pool"]["committed_bytes"] <= int(2.5 * rows)


def test_101_a_burst_is_served_or_refused_and_nothing_hangs(rand: Path) -> None:
    with serve(model=str(rand), slots=2, queue_limit=8) as small:
        answers = at_once(small.url, [{"prompt": "x", "max_tokens": 8, "stream": False}] * 80)
        codes = [answer.status_code for answer in answers]
        assert set(codes) <= {200, 429} and codes.count(200) >= 10
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
        assert small.text("x", max_tokens=2)


@pytest.mark.parametrize("n", [4, 5, 8])
def test_105_more_choices_than_slots_run_in_waves(digits: Live, n: int) -> None:
    body: Body = {"prompt": "x", "max_tokens": 20, "temperature": 0, "n": n}
    for answer in at_once(digits.url, [body | {"stream": False}] * 3):
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(n))
        assert {choice["text"] for choice in choices} == {"01234567890123456789"}
    frames = parse_sse(CLIENT.post(digits.url + "/generate", json=body).text)
    assert all(joined(frames, index) == "01234567890123456789" for index in range(n))
    assert digits.post(prompt="x", n=128).status_code == 422


def test_105_a_list_of_prompts_is_answered_in_order(digits: Live) -> None:
    prompts = ["x" * (length + 1) for length in range(10)]
    body = {"prompt": prompts, "max_tokens": 3, "temperature": 0, "n": 2}
    choices = CLIENT.post(digits.url + "/v1/completions", json=body).json()["choices"]
    script = "0123456789012"
    assert [choice["text"] for choice in choices] == [script[at : at + 3] for at in range(10) for _ in range(2)]
    assert [choice["index"] for choice in choices] == list(range(20))


# 11 Operations


def test_123_liveness_is_fast_while_slots_and_queue_are_full(rand: Path) -> None:
    with serve(model=str(rand), slots=1, queue_limit=2) as small:

        async def ask() -> None:
            async with httpx.AsyncClient(timeout=60) as client:
                body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": False}
                busy = [asyncio.create_task(client.post(small.url + "/generate", json=body)) for _ in range(3)]
                while len(small.service.streams) < 3:
                    await asyncio.sleep(0.001)
                for _ in range(20):
                    assert (await client.get(small.url + "/health")).status_code == 200
                assert {(await one).status_code for one in busy} == {200}

        asyncio.run(ask())


def test_error_bodies_are_json_whatever_they_quote(digits: Live) -> None:
    for prompt in ("\u2028\u0085", "\x1b[31m", "é" * 100):
        refused = digits.post(prompt="x", **{prompt: 1})
        assert refused.status_code == 422 and json.loads(refused.content)["error"]["message"]
