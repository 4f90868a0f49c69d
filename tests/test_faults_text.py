"""Bugs that other servers had with text, stop sequences and event streams, tried on this one (numbers of the survey).

One scripted model plays all cases: it continues a prompt of L tokens with TAPE[L - 1] and what follows, so each case
has its own place on the tape.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoints import EOS, tape
from live import CLIENT, Live, joined, parse_sse, serve
from safetensors.torch import load_file, save_file
from test_text import spm

SCRIPTS: dict[str, list[int]] = {
    "digits": [*b"0123456789"],
    "emoji": [*"A🙂B猫C".encode()],
    "near": [*b"abc<"],
    "long": [*(b"abcdefghijklmnopqrst" * 10)],
    "spread": [*b"onetwothreefour"],
    "overlap": [*b"out>>>END\nmore"],
    "end": [EOS],
    "lines": [*b"a\n\nb\r\nc\n"],
    "unicode": [*"a\u2028b\u0085c".encode()],
    "half": [*"ab🙂".encode()[:4]],
    "broken": [0x41, 0x80, 0xFF, 0xF0, 0x9F, 0x42],
    "specials": [*b"a", 258, *"é".encode(), 258, 263, *b"b"],
}
START: dict[str, int] = {}
for _name in SCRIPTS:
    START[_name] = sum(len(script) for script in list(SCRIPTS.values())[: len(START)])
TAPE = [token for script in SCRIPTS.values() for token in script]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(0.001, model=str(tape(tmp_path_factory.mktemp("tape") / "tape", TAPE, context=512)), slots=8) as server:
        yield server


@pytest.fixture(autouse=True)
def _healthy_afterwards(live: Live) -> Iterator[None]:
    """After every case the server still answers correctly and holds no stream."""
    yield
    assert live.text("x", max_tokens=3, temperature=0) == "012"
    live.wait_idle()
    assert len(live.service.streams) == 0


def both(live: Live, name: str, **body: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens of one script, the same on both endpoints, streamed or not."""
    body = {"max_tokens": len(SCRIPTS[name]), "temperature": 0, **body}
    prompt = [1] * (START[name] + 1)
    whole, frames = live.generate(prompt, **body), live.stream(prompt, **body)
    (choice,) = whole["choices"]
    expected = (choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"])
    assert expected == (joined(frames), frames[-1]["finish_reason"], frames[-1]["usage"]["completion_tokens"])
    sent, whole_text = "", choice["text"]
    for frame in frames:
        sent += frame.get("text", "")
        assert whole_text.startswith(sent)
    completion = CLIENT.post(live.url + "/v1/completions", json={"prompt": prompt, **body}).json()
    openai = (completion["choices"][0]["text"], completion["choices"][0]["finish_reason"])
    assert (*openai, completion["usage"]["completion_tokens"]) == expected
    chunks = live.stream(prompt, "/v1/completions", **body, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected[0]
    assert chunks[-2]["choices"][0]["finish_reason"] == expected[1] and chunks[-1]["usage"] == completion["usage"]
    return expected


# Text


def test_1_a_character_split_over_tokens_is_sent_whole(live: Live) -> None:
    assert both(live, "emoji") == ("A🙂B猫C", "length", 10)
    frames = live.stream([1] * (START["emoji"] + 1), max_tokens=10, temperature=0)
    assert not any("\ufffd" in frame.get("text", "") for frame in frames)


def test_1_incomplete_characters_and_invalid_bytes_read_the_same_streamed_or_not(live: Live) -> None:
    assert both(live, "half") == ("ab\ufffd", "length", 4)
    assert both(live, "broken") == (bytes(SCRIPTS["broken"]).decode("utf-8", "replace"), "length", 6)
    assert both(live, "specials", ignore_eos=True) == ("aéb", "length", 7)


@pytest.mark.parametrize("left", [0, 1])
def test_3_spaces_between_words_are_kept(tmp_path: Path, left: int) -> None:
    directory = tape(tmp_path / "spm", [258, 259, 260, 257])
    spm(**({"left": 1} if left else {})).backend.save(str(directory / "tokenizer.json"))
    with serve(model=str(directory), slots=1) as server:
        frames = server.stream([5], max_tokens=3, temperature=0)
        assert joined(frames) == server.text([5], max_tokens=3, temperature=0) == " I am here"[left:]


def test_5_text_held_back_for_a_stop_sequence_is_sent_at_the_end(live: Live) -> None:
    assert both(live, "near", stop=["<end>"]) == ("abc<", "length", 4)


def test_7_text_without_spaces_is_streamed_too(live: Live) -> None:
    frames = live.stream([1] * (START["long"] + 1), max_tokens=200, temperature=0)
    pieces = [frame["text"] for frame in frames if frame["type"] == "token"]
    assert "".join(pieces) == "abcdefghijklmnopqrst" * 10
    assert len(pieces) >= 50 and len(pieces[0]) < 20


# Stop conditions


def test_9_a_stop_sequence_split_over_tokens_never_leaks(live: Live) -> None:
    assert both(live, "spread", stop=["twothree"])[:2] == ("one", "stop")
    assert both(live, "spread", stop=["etwo", "fourth", "ef"])[:2] == ("on", "stop")


def test_11_the_earliest_match_wins(live: Live) -> None:
    assert both(live, "overlap", stop=[">>>END", ">>>END\n"])[:2] == ("out", "stop")
    assert both(live, "overlap", stop=["END", ">>>END"])[:2] == ("out", "stop")


def test_13_an_end_token_first_gives_an_empty_answer(live: Live) -> None:
    assert both(live, "end", max_tokens=5) == ("", "stop", 1)
    assert both(live, "digits", stop=["0"]) == ("", "stop", 1)

    async def beside_others() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            end = {"prompt": [1] * (START["end"] + 1), "stream": True}
            crowd = {"prompt": [1] * (START["long"] + 1), "max_tokens": 200, "temperature": 0, "stream": True}
            answers = await asyncio.gather(
                *(client.post(live.url + "/generate", json=b) for b in [crowd] * 5 + [end] * 5)
            )
            return [joined(parse_sse(answer.text)) for answer in answers]

    assert asyncio.run(beside_others()) == ["abcdefghijklmnopqrst" * 10] * 5 + [""] * 5


def test_15_a_cut_answer_finishes_with_length(live: Live) -> None:
    assert both(live, "digits", max_tokens=5) == ("01234", "length", 5)
    full = live.generate([1] * 500, max_tokens=12, ignore_eos=True, temperature=0)
    assert full["choices"][0]["finish_reason"] == "length" and full["usage"]["completion_tokens"] == 12
    chat = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    assert live.post("/v1/completions", prompt="x", **chat).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["", [""], ["", "c"]])
@pytest.mark.parametrize(("path", "status"), [("/generate", 422), ("/v1/completions", 400)])
def test_17_an_empty_stop_sequence_is_refused(live: Live, stop: Any, path: str, status: int) -> None:
    refused = live.post(path, prompt="x", stop=stop)
    assert refused.status_code == status and "stop" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stop", [[], None])
def test_17_an_empty_list_of_stop_sequences_means_none(live: Live, stop: Any) -> None:
    assert both(live, "digits", stop=stop) == ("0123456789", "length", 10)


# The event stream


def test_19_line_ends_in_text_survive_sse_framing(live: Live) -> None:
    assert both(live, "lines") == ("a\n\nb\r\nc\n", "length", 8)


def test_21_unicode_line_ends_do_not_break_clients_that_split_lines_at_them(live: Live) -> None:
    assert both(live, "unicode")[0] == "a\u2028b\u0085c"

    async def by_lines() -> str:
        body = {"prompt": [1] * (START["unicode"] + 1), "max_tokens": 8, "temperature": 0}
        text = ""
        async with httpx.AsyncClient() as client, client.stream("POST", live.url + "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:]).get("text", "")
        return text

    assert asyncio.run(by_lines()).startswith("a\u2028b\u0085c")


def test_23_85_a_failure_is_one_error_frame_and_affects_no_later_request(tmp_path: Path) -> None:
    directory = tape(tmp_path / "poisoned", "0123456789")
    weights = load_file(directory / "model.safetensors")
    weights["transformer.wpe.weight"][5] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with serve(model=str(directory), slots=1) as server:
        frames = server.stream("x", max_tokens=10, temperature=0)  # which checks that [DONE] comes once
        assert joined(frames) == "01234" and frames[-1]["type"] == "error"
        assert "not finite" in frames[-1]["error"]["message"] and "Traceback" not in json.dumps(frames)
        assert sum(frame["type"] == "error" for frame in frames) == 1
        whole = server.post(prompt="x", max_tokens=10, temperature=0, stream=False)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_failure"
        chunks = server.stream("x", "/v1/completions", max_tokens=10, temperature=0)
        assert "error" in chunks[-1] and "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "01234"
        assert server.text("x", max_tokens=5, temperature=0) == "01234", "in the same slot, after NaN was in its rows"
        server.wait_idle()


def test_25_usage_is_sent_once_and_only_on_request(live: Live) -> None:
    plain = live.stream("x", "/v1/completions", max_tokens=4)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    *chunks, last = live.stream("x", "/v1/completions", max_tokens=4, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


def test_27_headers_keep_proxies_from_buffering(live: Live) -> None:
    for path in ("/generate", "/v1/completions"):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        response = CLIENT.post(live.url + path, json=body, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
        assert not {"content-length", "content-encoding"} & response.headers.keys()
