"""POST /generate as a client sees it: frames, streamed and whole answers, refusals, limits."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from live import Live, joined, serve

from tokenteller.model.kv_memory import PAGE_BYTES


def test_a_stream_is_one_start_then_tokens_then_one_end(live: Live) -> None:
    frames = live.stream("hello", max_tokens=12, temperature=0)
    kinds = [frame["type"] for frame in frames]
    assert kinds[0] == "start" and kinds[-1] == "end"
    assert set(kinds[1:-1]) == {"token"}
    start, end = frames[0], frames[-1]
    assert start["prompt_tokens"] == 5
    assert start["kv"]["bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert end["finish_reason"] == "length"
    assert end["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "cached_tokens": 0}
    ids = [token for frame in frames if frame["type"] == "token" for token in frame["token_ids"]]
    assert len(ids) == 12


def test_streamed_and_whole_answers_are_the_same(live: Live) -> None:
    body = {"max_tokens": 40, "seed": 7, "temperature": 1.5}
    frames, answer = live.stream("both", **body), live.generate("both", **body)
    choice = answer["choices"][0]
    assert joined(frames) == choice["text"]
    assert [t for f in frames if f["type"] == "token" for t in f["token_ids"]] == choice["token_ids"]
    assert frames[-1]["finish_reason"] == choice["finish_reason"]
    assert frames[-1]["usage"] == answer["usage"] and choice["seed"] == 7


def test_headers_tell_proxies_not_to_buffer(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    headers = {"X-Request-Id": "client-1", "Accept-Encoding": "gzip"}
    with httpx.stream("POST", live.url + "/generate", json=body, headers=headers) as response:
        response.read()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "client-1"
    assert "content-length" not in response.headers and "content-encoding" not in response.headers


def test_a_seed_repeats_and_no_seed_does_not(live: Live) -> None:
    assert live.text("s", max_tokens=32, seed=3) == live.text("s", max_tokens=32, seed=3)
    assert len({live.text("s", max_tokens=32) for _ in range(4)}) > 1
    fresh = live.generate("s", max_tokens=32)["choices"][0]
    assert live.text("s", max_tokens=32, seed=fresh["seed"]) == fresh["text"]


def test_a_stop_sequence_ends_the_text_before_it_and_frees_the_slot(live: Live) -> None:
    whole = live.text("stop here", max_tokens=60, temperature=0)
    marker = whole[20:23]
    frames = live.stream("stop here", max_tokens=60, temperature=0, stop=[marker])
    assert joined(frames) == whole[: whole.index(marker)]
    assert frames[-1]["finish_reason"] == "stop"
    live.wait_idle()


def test_the_context_can_be_filled_to_the_last_row(live: Live) -> None:
    for prompt_tokens, max_tokens in ((255, 1), (1, 255), (200, 56)):
        answer = live.generate([7] * prompt_tokens, max_tokens=max_tokens, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == max_tokens
    refused = live.post(prompt=[7] * 200, max_tokens=57)
    error = refused.json()["error"]
    assert refused.status_code == 422 and error["code"] == "never_fits"
    assert error["max_tokens_that_fits"] == 56 and error["max_context"] == 256 and error["prompt_tokens"] == 200
    assert error["needed_bytes"] > 0 and error["pool_bytes"] > 0


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("asked", [300, 10**20, 10**39])
def test_what_never_fits_is_refused_with_the_bytes_it_would_need(
    live: Live, monkeypatch: pytest.MonkeyPatch, paged: bool, asked: int
) -> None:
    ledger = live.service.engine.scheduler.ledger
    layout = ledger.layout
    monkeypatch.setattr(ledger, "layout", replace(layout, paged=paged))
    error = live.post(prompt=[7], max_tokens=asked).json()["error"]
    formula = layout.bytes_per_token * asked  # one prompt token; the last token is not fed back
    assert formula <= error["needed_bytes"] < formula + layout.lanes * PAGE_BYTES
    assert f"needs {error['needed_bytes']} bytes" in error["message"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [264]}, "0..263"),
        ({"prompt": [-1]}, "0..263"),
        ({"prompt": [True]}, "integers"),
        ({"prompt": "x", "max_tokens": 0}, "at least 1"),
        ({"prompt": "x", "max_tokens": "10"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_token": 4}, "max_token"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "stream": "false"}, "stream"),
    ],
)
def test_a_wrong_field_is_refused_by_name(live: Live, body: dict[str, object], word: str) -> None:
    response = httpx.post(live.url + "/generate", json=body)
    assert response.status_code == 422
    assert word in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 422),
        (b"\xff", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "x", "prompt": "y"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"x" * 2**21 + b'"}', 413),
    ],
)
def test_an_invalid_body_is_refused_in_the_error_format(live: Live, raw: bytes, status: int) -> None:
    response = httpx.post(live.url + "/generate", content=raw)
    assert response.status_code == status
    assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_full_queue_refuses_with_retry_after_and_loses_nobody(live: Live) -> None:
    with serve(model=live.service.settings.model, slots=1, queue_limit=2) as small:
        with httpx.Client(timeout=60) as client:
            running = [
                client.stream(
                    "POST", small.url + "/generate", json={"prompt": "x", "max_tokens": 250, "ignore_eos": True}
                )
                for _ in range(3)
            ]
            responses = [stream.__enter__() for stream in running]
            refused = small.post(prompt="x")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["queue_limit"] == 2
            for response, stream in zip(responses, running, strict=True):
                assert b'"finish_reason":"length"' in response.read()
                stream.__exit__(None, None, None)
        assert small.text("x", max_tokens=2)


def test_unknown_paths_and_methods_are_refused_in_the_error_format(live: Live) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/generate", 405), ("PUT", "/health", 405)):
        response = httpx.request(method, live.url + path)
        assert response.status_code == status
        assert "message" in response.json()["error"]


def test_head_answers_like_get_without_a_body(live: Live) -> None:
    for path in ("/health", "/ready", "/plan", "/slots"):
        response = httpx.head(live.url + path)
        assert response.status_code == 200 and response.content == b""


def test_every_choice_has_its_own_index_text_and_end_and_repeats(live: Live) -> None:
    body = {"max_tokens": 24, "seed": 7, "temperature": 1.5, "n": 3, "logprobs": 2}
    answer, frames = live.generate("many", **body), live.stream("many", **body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    ends = [frame for frame in frames if frame["type"] == "end"]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]
    for choice in choices:
        mine = [f for f in frames if f["type"] == "token" and f["index"] == choice["index"]]
        assert joined(frames, choice["index"]) == choice["text"]
        assert [id for frame in mine for id in frame["token_ids"]] == choice["token_ids"]
        assert [entry for frame in mine for entry in frame["logprobs"]] == choice["logprobs"]
        (end,) = (end for end in ends if end["index"] == choice["index"])
        assert end["finish_reason"] == choice["finish_reason"]
        assert end["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    alone = live.generate("many", **body | {"n": 1})["choices"][0]
    assert alone["text"] == choices[0]["text"], "the first choice must not depend on n"


def test_logprobs_do_not_depend_on_sampling_parameters(live: Live) -> None:
    plain = live.generate("logprobs", max_tokens=1, temperature=0, logprobs=5)["choices"][0]["logprobs"][0]
    assert len(plain["top"]) == 5 and plain["top"][0]["token_id"] == plain["token_id"]
    assert plain["top"][0]["logprob"] == plain["logprob"] < 0
    for change in ({"temperature": 2.0}, {"top_p": 0.1}, {"top_k": 2}, {"repetition_penalty": 2.0}):
        entry = live.generate("logprobs", **{"max_tokens": 1, "logprobs": 5, **change})["choices"][0]["logprobs"][0]
        assert entry["top"] == plain["top"]
    only = live.generate("logprobs", max_tokens=2, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]
    assert [entry["top"] for entry in only] == [[], []]
    assert "logprobs" not in live.generate("logprobs", max_tokens=2)["choices"][0]


def test_bias_penalties_and_min_tokens_do_what_they_say(live: Live) -> None:
    assert live.text("x", max_tokens=5, temperature=0, logit_bias={"65": 100}) == "AAAAA"
    falling = live.text("x", max_tokens=40, temperature=0, logit_bias={"65": 100, "66": 99}, frequency_penalty=2)
    assert set(falling) == {"A", "B"}, "each use costs 2, so they alternate"
    ends = {"max_tokens": 20, "logit_bias": {"257": 100}}
    assert live.generate("x", **ends)["usage"]["completion_tokens"] == 1
    late = live.generate("x", **ends, min_tokens=7)
    assert late["usage"]["completion_tokens"] == 8 and late["choices"][0]["finish_reason"] == "stop"
    assert live.generate("x", **ends, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    letter = live.generate("x", max_tokens=20, logit_bias={"65": 100}, stop_token_ids=[65])
    assert letter["choices"][0]["text"] == "" and letter["choices"][0]["token_ids"] == [65]


@pytest.mark.parametrize(
    ("change", "param", "word"),
    [
        ({"logit_bias": {"264": 1}}, "logit_bias", "0..263"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"7": 1, "07": 1}}, "logit_bias", "twice"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7", "at most 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "0..263"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "8"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"n": 9}, "n", "at most 8"),
        ({"n": 0}, "n", "at least 1"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 2.5}, "top_k", "integer"),
        ({"top_p": 0}, "top_p", "more than 0"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"stop": ["a", 5]}, "stop.1", "string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": "x" * 257}, "stop.0", "at most 256"),
        ({"{0}": 1}, "{0}", "unknown"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(
    live: Live, change: dict[str, object], param: str, word: str
) -> None:
    response = live.post(**{"prompt": "x", **change})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["param"] == param and word in error["message"], error


def test_null_means_absent(live: Live) -> None:
    nulls = dict.fromkeys(("max_tokens", "seed", "stop", "logprobs", "logit_bias", "n", "top_k", "min_tokens"), None)
    assert live.text("x", temperature=0, **nulls) == live.text("x", temperature=0)
    assert live.post(prompt="x", max_token=None).status_code == 422
