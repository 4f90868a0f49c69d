"""What waits is explained, what is told holds, what is reused changes nothing: on a real server."""

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

from deploy import simulate
from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.engine.sequence import Started

PACE = 0.002  # seconds a step, so that what is to wait does wait on every machine
COMMENT = re.compile(r": waiting position=(\d+) for=(\w+) latest_ms=(\d+|unknown)")


@pytest.fixture(scope="module")
def narrow(rand: Path) -> Iterator[Live]:
    """Two slots, and a pool that holds one sequence at full length and a half."""
    with serve(PACE, model=str(rand), slots=2, kv_memory=192 * 1024, prefill_chunk=16) as server:
        yield server


def raw(live: Live, **body: Any) -> str:
    """The whole text of a stream, comments and all."""
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


def test_one_that_waits_is_told_its_place_what_binds_and_the_latest_time(rand: Path) -> None:
    with serve(PACE, model=str(rand), slots=1) as live:
        threads = busy(live, 1, max_tokens=240)
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(lambda _: raw(live, prompt="x", max_tokens=200, ignore_eos=True), range(2)))
        told = [COMMENT.search(text) for text in texts]
        assert {match[1] for match in told if match} >= {"1"}
        assert all(match[2] in ("slot", "turn") and match[3] != "unknown" for match in told if match)
        for thread in threads:
            thread.join()


def test_the_first_request_too_is_told_when_its_first_token_may_come(rand: Path) -> None:
    with serve(model=str(rand)) as live:
        start = live.stream("x", max_tokens=1)[0]
        assert start["timing"]["predicted_ttft_ms"] > start["queued_ms"]


class Promises:
    """Of each request that had to wait: by when it was told its slot, and when it got it; in steps and in seconds."""

    def __init__(self, live: Live) -> None:
        self.scheduler = scheduler = live.service.engine.scheduler
        self.steps: list[tuple[int, int]] = []  # told, real
        self.seconds: list[tuple[float, float]] = []
        self._open: dict[str, tuple[float, int, int, float | None]] = {}
        submit, plan = scheduler.submit, scheduler.plan
        table = scheduler.ledger.timetable

        def booked(request: Any, now: float) -> None:
            submit(request, now)
            waits = scheduler.sequences(request.id)[0]
            if waits.plan and waits.plan.begin > table.now:
                self._open[request.id] = now, table.now, waits.plan.begin, scheduler.latest_s(waits)

        def started(now: float) -> Any:
            step = plan(now)
            for event in step.events:
                told = self._open.pop(event.request_id, None) if isinstance(event, Started) else None
                if told:
                    came, clock, begin, latest_s = told
                    self.steps.append((begin - clock, table.now - clock))
                    self.seconds.append((latest_s or 0.0, now - came))
            return step

        scheduler.submit, scheduler.plan = booked, started  # type: ignore[method-assign]


def keep_asking(live: Live, requests: int, clients: int, rng: random.Random) -> None:
    """Clients that ask for random lengths and read quickly, so that some always wait."""

    def one(_: int) -> None:
        prompt = [rng.randrange(200) for _ in range(rng.choice((4, 20, 60)))]
        raw(live, prompt=prompt, max_tokens=rng.choice((10, 40, 120)), ignore_eos=rng.random() < 0.7)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(requests)))


@pytest.mark.parametrize(
    ("rule", "requests", "clients"),
    [("peak", 60, 16), ("reserve", 60, 16), pytest.param("peak", 200, 200, marks=pytest.mark.slow)],
)
def test_nobody_gets_its_slot_later_than_told(rand: Path, rule: str, requests: int, clients: int) -> None:
    pool = {"slots": 6, "kv_memory": 384 * 1024, "prefill_chunk": 16, "stream_buffer": 4096}
    with serve(model=str(rand), admission=rule, **pool) as live:
        promises = Promises(live)
        keep_asking(live, requests, clients, random.Random(1))
        assert len(promises.steps) > requests // 3, "too few had to wait"
        assert all(real <= told for told, real in promises.steps)
        assert promises.scheduler.counts.postponed == 0


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", simulate.MIXES)
def test_nobody_in_a_simulated_queue_waits_longer_than_told(mix: str, requests: int) -> None:
    options = simulate.arguments(["--slots", "16", "--pool-rows", "4096", "--row-us", "2000", "--step-ms", "100"])
    layout = KVLayout(1, 1, 64, options.max_context)
    simulation = simulate.Simulation(options, "peak", layout, layout.committed(4096))
    figures = simulation.run(simulate.mix_jobs(mix, requests, 7))
    assert len(figures.told) > requests // 2, "too few had to wait"
    assert figures.late == simulation.scheduler.counts.postponed == 0


@pytest.mark.parametrize(("keeps_text", "steps"), [(True, 33), (False, 40)])
def test_a_model_of_eviction_computes_the_text_again_or_makes_it_anew(keeps_text: bool, steps: int) -> None:
    """Three pages of 16 rows, two of 10 + 20 tokens: both want row 17 in step 8, and the younger is evicted after 7 of
    its tokens. The older ends in step 20; 13 steps or 20 are left."""
    layout = KVLayout(1, 1, 64, 64)
    model = simulate.Optimistic(simulate.arguments([]), layout, layout.committed(48), keeps_text)
    figures = model.run(iter([simulate.Job(0.0, 10, 30, 20)] * 2))
    assert (figures.steps, figures.evicted, figures.tokens, len(figures.queued)) == (steps, 1, 40, 2)


def test_a_trace_is_simulated_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,max_tokens,output\n1.5,10,30,20\n100,10,30,30\n")
    options = simulate.arguments(["--step-ms", "1000"])
    layout = KVLayout(1, 1, 64, 64)
    figures = simulate.Simulation(options, "peak", layout, layout.committed(64)).run(simulate.trace_jobs(str(trace)))
    assert (figures.steps, figures.tokens, figures.time, list(figures.queued)) == (50, 50, 130.0, [0.0, 0.0])


HEADING = "arrival,prompt,max_tokens,output\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "line 1: [Errno 2] No such file"),
        ("", "line 1: want the columns arrival, prompt, max_tokens, output"),
        ("a,b\n1,2\n", "line 1: want the columns arrival, prompt, max_tokens, output"),
        (HEADING, "line 1: no request"),
        (HEADING + "0,10,5,5\n1,10\n", "line 3: invalid literal for int()"),
        (HEADING + "nan,10,5,5\n", "line 2: arrival nan"),
        (HEADING + "inf,10,5,5\n", "line 2: arrival inf"),
        (HEADING + "5,10,5,5\n1,10,5,5\n", "line 3: arrival 1 is before 5"),
        (HEADING + "0,0,5,5\n", "line 2: want a prompt of at least 1"),
        (HEADING + "0,10,5,6\n", "line 2: want a prompt of at least 1 and an output of 1 to max_tokens"),
    ],
)
def test_a_wrong_trace_is_one_line_with_its_number_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    trace = tmp_path / "trace.csv"
    if text is not None:
        trace.write_text(text)
    assert simulate.main(["--trace", str(trace)]) == 2
    out, told = capsys.readouterr()
    assert told.startswith(f"simulate: {trace}, {said}") and told.count("\n") == 1 and not out


@pytest.mark.parametrize(
    "wrong",
    [
        "--requests 0",
        "--slots 0",
        "--queue 0",
        "--chunk 0",
        "--pool-rows 1",
        "--max-context 1",
        "--step-ms nan",
        "--mix",
    ],
)
def test_a_simulation_that_could_not_end_is_wrong_usage(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.arguments(wrong.split())
    assert ended.value.code == 2 and wrong.split()[0] in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rule", simulate.RULES)
def test_what_can_never_fit_is_refused_as_a_server_would(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A context of 64 and a pool of 48 rows: 39 + 10 tokens need all of it, one more or a longer prompt never fits."""
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADING + "0,39,10,10\n0,40,10,1\n0,999,5,2\n0,1,3,3\n")
    flags = ["--trace", str(trace), "--rule", rule, "--pool-rows", "48", "--max-context", "64"]
    assert simulate.main(flags) == 0
    heading, figures = capsys.readouterr().out.splitlines()
    assert figures[heading.index("refused") - 5 :].split()[0] == "2"
    trace.write_text(HEADING + "0,999,5,2\n")
    assert simulate.main(flags) == 0


def test_a_request_can_be_asked_about_by_its_own_id_and_by_ours(narrow: Live) -> None:
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


def test_patience_and_deadlines_end_a_request_with_their_own_reason(narrow: Live) -> None:
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


def test_a_queue_is_bounded_in_prompt_tokens_too(rand: Path) -> None:
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
        assert live.generate([1] * 150, max_tokens=1)  # more than the bound, but nobody waits


@pytest.mark.parametrize("chunk", [7, 32])
def test_reuse_changes_no_byte_and_is_reported(rand: Path, chunk: int) -> None:
    """Cold, taken over whole (a chat's next turn), copied from a resident slot and from a running one."""
    system = [10 + at % 200 for at in range(90)]
    ask = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True, "logprobs": 2}
    with serve(PACE, model=str(rand), slots=4, prefill_chunk=chunk) as live:
        cold = {at: live.generate([*system, at], cache_prefix=False, **ask) for at in (1, 2)}
        assert cold[1]["usage"]["cached_tokens"] == 0
        first = live.generate([*system, 1], **ask)
        assert first["usage"]["cached_tokens"] == 0  # the cold ones left nothing behind
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


def test_siblings_share_their_prompt_and_come_in_waves_where_slots_are_few(rand: Path) -> None:
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
