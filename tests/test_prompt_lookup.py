"""Draft tokens: what is looked up, when it pays, and that a server which drafts says the same as one that does not."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import joined, serve

from tokenteller.server.engine.prompt_lookup import CANDIDATES, MAX_MATCH, MAX_PAUSE, MIN_MATCH, PromptLookup


def match_length(tokens: list[int], place: int) -> int:
    """How many tokens up to `place` agree with the end of the text."""
    end, same = len(tokens) - 1, 0
    while same <= place and same < MAX_MATCH and tokens[place - same] == tokens[end - same]:
        same += 1
    return same


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_a_draft_continues_the_latest_of_the_longest_matches(tokens: list[int], most: int) -> None:
    matches = [place for place in range(len(tokens) - 1) if match_length(tokens, place) >= MIN_MATCH][-CANDIDATES:]
    draft = PromptLookup().draft(tokens, 0.0, most)
    if not matches:
        assert draft == []
        return
    best = max(matches, key=lambda place: (match_length(tokens, place), place))
    after = tokens.copy()
    while len(after) < len(tokens) + most:
        after.append(after[best + 1 + len(after) - len(tokens)])
    assert draft == after[len(tokens) :]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.data())
def test_a_growing_text_drafts_as_a_whole_one_does(tokens: list[int], data: st.DataObject) -> None:
    growing, length = PromptLookup(), 0
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        assert growing.draft(tokens[:length], 0.0, 4) == PromptLookup().draft(tokens[:length], 0.0, 4)


def test_a_draft_is_as_long_as_its_rows_are_worth() -> None:
    text, lengths = [1, 2, 3] * 5, {}
    for price in (0.0, 0.1, 0.2, 0.4, 0.6):
        lookup = PromptLookup()
        lookup.learn(3, 1)  # 3.9 of 5.35, so 0.73; 0.53, 0.39, 0.28, 0.21, 0.15, 0.11, 0.08
        lengths[price] = len(lookup.draft(text, price, 9))
    assert lengths == {0.0: 9, 0.1: 7, 0.2: 5, 0.4: 2, 0.6: 1}


def test_wrong_drafts_become_rare_and_a_right_one_brings_them_back() -> None:
    lookup, text = PromptLookup(), [1, 2, 3] * 5
    tries = []
    for step in range(400):
        if lookup.draft(text, 0.3, 8):
            tries.append(step)
            lookup.learn(0, 1)
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[:2] == [1, 1] and gaps[-1] == MAX_PAUSE + 1 and gaps == sorted(gaps)
    while not lookup.draft(text, 0.3, 8):
        pass
    lookup.learn(1, 0)
    assert lookup.draft(text, 0.3, 8)


def wanted() -> list[dict[str, Any]]:
    """Texts that repeat themselves, greedy and seeded, with all that shapes a text or ends it."""
    rng = random.Random(5)
    prompts = [
        "To be, or not to be",
        "ROMEO:\nWhat light",
        "la la la la la",
        "First Citizen:\nSpeak, speak.\n\nAll:\nSpeak",
    ]
    shapes: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"logprobs": 3},
        {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.05},
        {"stop": [" the", "\n\n"]},
        {"min_tokens": 40, "ignore_eos": False, "stop_token_ids": list(range(260, 300))},
        {"logit_bias": {"260": 2.0}, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"regex": "(ab|ba){5,30}", "ignore_eos": False},
    ]
    bodies = [
        {"prompt": prompt, "temperature": temperature, "seed": rng.randrange(2**40), "ignore_eos": True} | shape
        for prompt in prompts
        for shape in shapes
        for temperature in (0.0, 0.4)
    ]
    return [body | {"max_tokens": rng.randint(40, 120)} for body in bodies]


@pytest.fixture
def daring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts whether it pays or not, so that no test depends on the speed of this machine."""
    monkeypatch.setattr("tokenteller.server.engine.drafting.MARGIN", 0.0)
    monkeypatch.setattr("tokenteller.server.engine.drafting.MIN_STEP_S", 0.0)


@pytest.mark.usefixtures("daring")
def test_a_server_says_the_same_whether_it_drafts_or_not() -> None:
    bodies = wanted()
    with serve(slots=16, draft_tokens=0) as live:
        plain = [live.generate(**body) for body in bodies]
        assert not live.service.engine.scheduler.counts.drafted
    with serve(slots=16, draft_tokens=8) as live:
        counts = live.service.engine.scheduler.counts
        alone = [live.generate(**body) for body in bodies]
        assert counts.drafted >= counts.accepted > 500, "too few to tell"
        before = counts.accepted
        with ThreadPoolExecutor(16) as threads:
            together = list(threads.map(lambda body: live.generate(**body), bodies))
            streamed = list(threads.map(lambda body: live.stream(**body), bodies))
        assert counts.accepted > before
        metrics = httpx.get(live.url + "/metrics").text
        assert f'spec_decode_num_accepted_tokens_total{{model_name="toy"}} {float(counts.accepted)}' in metrics
        live.wait_idle()
        live.service.engine.ask(lambda scheduler, _: scheduler.check()).result(5)
        pool = live.slots()["pool"]
        assert pool["resident_bytes"] == pool["committed_bytes"]
    for answer in (alone, together):
        for one, other in zip(plain, answer, strict=True):
            assert one["choices"] == other["choices"]
            assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
    for one, frames in zip(plain, streamed, strict=True):
        for choice in one["choices"]:
            assert joined(frames, choice["index"]) == choice["text"]
    # what one step has made comes in one frame
    assert max(len(frame.get("token_ids", ())) for frames in streamed for frame in frames) > 4


@pytest.mark.usefixtures("daring")
def test_pool_and_ledger_agree_while_drafts_are_wrong_clients_leave_and_readers_stop(rand: Path) -> None:
    """A small random model soon repeats itself, but not for long at this temperature."""
    rng = random.Random(2)
    with serve(model=str(rand), slots=8, kv_memory=768 * 1024, draft_tokens=8, buffer_tokens=8) as live:

        def one(at: int) -> None:
            body = {"prompt": [at % 7] * rng.randrange(1, 60), "max_tokens": 150, "temperature": 0.3, "seed": at}
            with httpx.stream("POST", live.url + "/generate", json=body | {"ignore_eos": True}) as response:
                for at, _ in enumerate(response.iter_raw()):
                    if rng.random() < 0.02:
                        time.sleep(0.05)
                    if at > 40 and rng.random() < 0.02:
                        return

        with ThreadPoolExecutor(5) as threads:  # nobody waits, or nothing would be drafted
            work = [threads.submit(one, at) for at in range(40)]
            while not all(future.done() for future in work):
                pool = live.slots()["pool"]
                assert pool["resident_bytes"] == pool["committed_bytes"]
                live.service.engine.ask(lambda scheduler, _: scheduler.check()).result(5)
        for future in work:
            future.result()
        counts = live.service.engine.scheduler.counts
        assert counts.drafted > counts.accepted > 50
        assert live.wait_idle()["pool"]["lent_bytes"] == 0
