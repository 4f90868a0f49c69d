"""On a real server: waiting is explained, reported times hold, and the prefix cache changes no byte."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live, serve

from tokenteller.server.engine.sequence import Started
from tokenteller.server.engine.waiting import latest_start_s

PACE = 0.002  # seconds a step, so that what is to wait does wait on every machine
COMMENT = re.compile(r": waiting position=(\d+) for=(\w+) latest_ms=(\d+|unknown)")


@pytest.fixture(scope="module")
def narrow(rand: Path) -> Iterator[Live]:
    """Two slots, and a pool for one and a half sequences of full length."""
    with serve(PACE, model=str(rand), slots=2, kv_memory=192 * 1024, prefill_chunk=16) as server:
        yield server


def raw(live: Live, **body: Any) -> str:
    """The raw text of a stream, with its comments."""
    with httpx.stream("POST", live.url + "/generate", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return b"".join(response.iter_raw()).decode()


def busy(live: Live, count: int, **body: Any) -> list[threading.Thread]:
    """`count` long streams, once they all have a slot."""
    body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0} | body
    threads = [
        threading.Thread(target=raw, args=(live,), kwargs=body | {"prompt": f"busy {at}"}) for at in range(count)
    ]
    for thread in threads:
        thread.start()
    while sum(slot["state"] == "running" for slot in live.slots()["slots"]) < count:
        time.sleep(0.005)
    return threads


def test_a_waiting_request_is_told_its_position_what_it_waits_for_and_its_latest_start(rand: Path) -> None:
    with serve(PACE, model=str(rand), slots=1) as live:
        threads = busy(live, 1, max_tokens=240)
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(lambda _: raw(live, prompt="x", max_tokens=200, ignore_eos=True), range(2)))
        told = [COMMENT.search(text) for text in texts]
        assert {match[1] for match in told if match} >= {"1"}
        assert all(match[2] in ("slot", "turn") and match[3] != "unknown" for match in told if match)
        for thread in threads:
            thread.join()


def test_even_the_first_request_gets_a_predicted_first_token_time(rand: Path) -> None:
    with serve(model=str(rand)) as live:
        start = live.stream("x", max_tokens=1)[0]
        assert start["timing"]["predicted_ttft_ms"] > start["queued_ms"]


class Promises:
    """Reported latest start and real start of each request that had to wait, in steps and in seconds."""

    def __init__(self, live: Live) -> None:
        self.scheduler = scheduler = live.service.engine.scheduler
        self.steps: list[tuple[int, int]] = []  # told, real
        self.seconds: list[tuple[float, float]] = []
        self._open: dict[str, tuple[float, int, int, float | None]] = {}
        submit, plan = scheduler.submit, scheduler.plan
        timeline = scheduler.timeline

        def booked(request: Any, now: float) -> None:
            submit(request, now)
            waits = scheduler.sequences(request.id)[0]
            if waits.reservation and waits.reservation.begin > timeline.now:
                self._open[request.id] = now, timeline.now, waits.reservation.begin, latest_start_s(scheduler, waits)

        def started(now: float) -> Any:
            step = plan(now)
            for event in step.events:
                told = self._open.pop(event.request_id, None) if isinstance(event, Started) else None
                if told:
                    came, clock, begin, latest_s = told
                    self.steps.append((begin - clock, timeline.now - clock))
                    self.seconds.append((latest_s or 0.0, now - came))
            return step

        scheduler.submit, scheduler.plan = booked, started  # type: ignore[method-assign]


def keep_asking(live: Live, requests: int, clients: int, rng: random.Random) -> None:
    """Clients with random lengths that read fast, so that some always wait."""

    def one(_: int) -> None:
        prompt = [rng.randrange(200) for _ in range(rng.choice((4, 20, 60)))]
        raw(live, prompt=prompt, max_tokens=rng.choice((10, 40, 120)), ignore_eos=rng.random() < 0.7)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(requests)))


@pytest.mark.parametrize(
    ("rule", "requests", "clients"),
    [("peak", 60, 16), ("reserve", 60, 16), pytest.param("peak", 200, 200, marks=pytest.mark.slow)],
)
def test_no_request_starts_later_than_reported(rand: Path, rule: str, requests: int, clients: int) -> None:
    pool = {"slots": 6, "kv_memory": 384 * 1024, "prefill_chunk": 16, "buffer_tokens": 4096}
    with serve(model=str(rand), admission=rule, **pool) as live:
        promises = Promises(live)
        keep_asking(live, requests, clients, random.Random(1))
        assert len(promises.steps) > requests // 3, "too few requests had to wait"
        assert all(real <= told for told, real in promises.steps)
        assert promises.scheduler.counts.postponed == 0


def test_a_request_is_found_by_the_clients_id_and_by_ours(narrow: Live) -> None:
    threads = busy(narrow, 2, max_tokens=180)
    headers = {"X-Request-Id": "client-7"}
    body = {"prompt": "waits", "max_tokens": 100, "ignore_eos": True}
    with httpx.stream("POST", narrow.url + "/generate", json=body, headers=headers, timeout=60) as response:
        told = httpx.get(narrow.url + "/requests/client-7").json()
        assert told["id"].startswith("gen-")
        assert httpx.get(narrow.url + f"/requests/{told['id']}").status_code in (200, 404)  # it may have ended by now
        if told["state"] == "waiting":
            assert told["waiting"]["position"] == 1 and told["waiting"]["for"] in ("slot", "kv_bytes", "turn")
            assert {holder["slot"] for holder in told["waiting"]["held_by"]} <= {0, 1}
            assert told["waiting"]["latest_ms"] >= 0
        else:
            assert told["choices"][0]["rows_max"] == 5 + 100 - 1
        response.read()
    for thread in threads:
        thread.join()
    gone = httpx.get(narrow.url + "/requests/client-7")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


def test_max_queue_ms_and_deadline_ms_end_a_request_with_reason_deadline(narrow: Live) -> None:
    threads = busy(narrow, 2, max_tokens=120)
    queued = narrow.stream("x", max_tokens=8, max_queue_ms=1)
    assert [frame["type"] for frame in queued] == ["end"] and queued[0]["finish_reason"] == "deadline"
    answer = narrow.generate("x", max_tokens=8, deadline_ms=1)
    assert answer["choices"][0]["finish_reason"] == "deadline" and answer["slot"] is None
    for thread in threads:
        thread.join()
    late = narrow.generate("y", max_tokens=240, deadline_ms=30, ignore_eos=True)
    choice = late["choices"][0]
    assert choice["finish_reason"] == "deadline" and len(choice["token_ids"]) < 16
    assert narrow.wait_idle()["pool"]["lent_bytes"] == 0


def test_the_queue_is_also_limited_in_prompt_tokens(rand: Path) -> None:
    with serve(PACE, model=str(rand), slots=1, queue_tokens=100) as live:
        threads = busy(live, 1, max_tokens=240)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(raw, live, prompt=[1] * 80, max_tokens=1)
            while not live.slots()["waiting"]:
                time.sleep(0.002)
            refused = live.post(prompt=[1] * 30, max_tokens=1)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["waiting_tokens"] == 80
            waiting.result()
        for thread in threads:
            thread.join()
        assert live.generate([1] * 150, max_tokens=1)  # over the limit, but nobody waits


@pytest.mark.parametrize("chunk", [7, 32])
def test_the_prefix_cache_changes_no_byte_and_is_reported(rand: Path, chunk: int) -> None:
    """Without the cache, a chat's next turn, copied from a cached prefix and from a running sequence."""
    system = [10 + at % 200 for at in range(90)]
    ask = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True, "logprobs": 2}
    with serve(PACE, model=str(rand), slots=4, prefill_chunk=chunk) as live:
        cold = {at: live.generate([*system, at], cache_prefix=False, **ask) for at in (1, 2)}
        assert cold[1]["usage"]["cached_tokens"] == 0
        first = live.generate([*system, 1], **ask)
        assert first["usage"]["cached_tokens"] == 0  # the runs without the cache left nothing behind
        copied = live.generate([*system, 2], **ask)
        assert copied["usage"]["cached_tokens"] == 90
        for at, answer in ((1, first), (2, copied)):
            assert answer["choices"] == cold[at]["choices"]
        turn = [*system, 1, *first["choices"][0]["token_ids"], 7, 8, 9]
        continued = live.generate(turn, **ask)
        assert continued["usage"]["cached_tokens"] == 90 + 1 + 24 - 1
        assert continued["choices"] == live.generate(turn, cache_prefix=False, **ask)["choices"]
        with ThreadPoolExecutor(4) as pool:
            prompts = [[*system[::-1], at] for at in range(4)]
            together = list(pool.map(lambda prompt: live.generate(prompt, **ask), prompts))
        for prompt, answer in zip(prompts, together, strict=True):
            assert answer["choices"] == live.generate(prompt, cache_prefix=False, **ask)["choices"]
        salted = live.generate([*system, 1], cache_salt="mine", **ask)
        assert salted["usage"]["cached_tokens"] == 0 and salted["choices"] == cold[1]["choices"]
        again = live.generate([*system, 1], cache_salt="mine", **ask)
        assert again["usage"]["cached_tokens"] == 90 and again["choices"] == cold[1]["choices"]


def test_choices_share_their_prompt_and_run_in_waves_if_slots_are_few(rand: Path) -> None:
    prompt, ask = list(range(100)), {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    with serve(PACE, model=str(rand), slots=3, prefill_chunk=16) as live:
        rows = [0]
        engine = live.service.engine
        run = engine.runner.run

        def count(step: Any) -> Any:
            rows[0] += step.rows
            return run(step)

        engine.runner.run = count  # type: ignore[method-assign]
        answer = live.generate(prompt, n=8, **ask)
        assert len(answer["choices"]) == 8
        most = 100 + 7 + 8 * 19  # the last row of a prompt is always computed, the last token never fed back
        assert rows[0] < most + 16, "more than what was planned for a follower in one step was computed twice"
        alone = live.generate(prompt, n=8, cache_prefix=False, **ask)
        assert alone["choices"] == answer["choices"]
        assert live.wait_idle()["pool"]["lent_bytes"] == 0
