"""The page in a real browser: text streams in, the pool is shown live, and it works on a phone and by keyboard."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live import CLIENT, Live, serve, stream_raw

from tokenteller.server.api import page, pool_feed

HERE = Path(page.__file__).parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PROMPT = ".composer textarea"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=FLAGS)
        yield launched
        launched.close()


class Paced:
    """The toy with steps slow enough that what a test looks for is still there when it looks."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.step_s = 0.0
        runner = live.service.engine.runner
        run = runner.run
        runner.run = lambda step: (time.sleep(self.step_s * bool(step.spans)), run(step))[1]  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def toy() -> Iterator[Paced]:
    with serve(model="toy", slots=4) as live:
        yield Paced(live)


@pytest.fixture
def paced(toy: Paced) -> Iterator[Paced]:
    yield toy
    toy.step_s = 0.0
    toy.live.wait_idle(30)


@contextmanager
def opened(browser: Any, live: Live, **context: Any) -> Iterator[Any]:
    """The loaded page. Fails at the end if it had an error or loaded anything from elsewhere."""
    faults: list[str] = []
    quiet = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}  # cheaper to render
    made = browser.new_context(**quiet | context)
    made.set_default_timeout(30_000)
    page = made.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
    page.on("request", lambda sent: None if sent.url.startswith(live.url) else faults.append(f"asked {sent.url}"))
    page.goto(live.url + "/")
    page.wait_for_selector(".state.ok, .key")
    yield page
    made.close()
    assert not faults


def until(page: Any, true: str, seconds: float = 30.0) -> None:
    """Waits for a JavaScript expression to be true. Polls from outside: the page's policy forbids eval."""
    end = time.monotonic() + seconds
    while not page.evaluate(true):
        assert time.monotonic() < end, f"never came true: {true}"
        page.wait_for_timeout(30)


def write(page: Any, prompt: str) -> None:
    page.fill(PROMPT, prompt)
    page.press(PROMPT, "Control+Enter")


def test_text_streams_in_the_slot_fills_and_frees_and_escape_stops(browser: Any, paced: Paced) -> None:
    figure = "document.querySelector('.slots .figure').textContent"
    with opened(browser, paced.live) as page:
        page.click(".sampling summary")
        page.check(".fields input[type=checkbox]")  # ignore the end-of-text token
        paced.step_s = 0.1
        write(page, "ROMEO:\n")
        until(page, "document.querySelectorAll('.output .fresh').length >= 3")
        part = page.text_content(".output")
        until(page, f"{figure}.startsWith('1 of 4')")
        page.focus(".slots canvas")
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.slots .hint').textContent.startsWith('slot 0: gen-')")
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.slots .hint').textContent === 'slot 1: free'")
        paced.step_s = 0.0
        until(page, "!document.querySelector('.output.busy')")
        whole = page.text_content(".output")
        assert whole.startswith(part) and len(whole) > len(part) > 0
        facts = page.text_content(".facts")
        assert all(word in facts for word in ("slot", "first token", "tokens 128", "seed"))
        until(page, f"{figure}.startsWith('0 of 4')")
        assert page.text_content(".paper .prompt") == "ROMEO:\n"
        assert page.evaluate("document.querySelectorAll('.gaps canvas').length") == 1

        paced.step_s = 0.1
        for stop in (lambda: page.keyboard.press("Escape"), lambda: page.click(".composer button.stop")):
            page.click(".composer button")
            until(page, "document.querySelectorAll('.output .fresh').length >= 2")
            stop()
            until(page, "document.querySelector('.facts').textContent.includes('stopped by you')")
            paced.live.wait_idle(10)


def test_a_chat_continues_over_turns(browser: Any, paced: Paced) -> None:
    with opened(browser, paced.live) as page:
        page.click("text=Chat")
        page.click(".sampling summary")
        page.fill(".fields input[type=range]", "16")  # tokens
        for turn in (1, 2):
            page.fill(PROMPT, f"How now, and what of turn {turn}?")
            page.press(PROMPT, "Enter")
            until(page, f"document.querySelectorAll('.paper .assistant').length === {turn}")
            assert page.locator(".paper .user").count() == turn
        assert page.text_content(".paper .assistant") and page.text_content(".output") == ""


def test_the_queue_shows_why_requests_wait(browser: Any, paced: Paced) -> None:
    body = {"prompt": "busy", "max_tokens": 100, "ignore_eos": True}
    paced.step_s = 0.3
    with opened(browser, paced.live) as page, ThreadPoolExecutor(6) as threads:
        holders = [threads.submit(stream_raw, paced.live.url, **body) for _ in range(6)]
        until(page, "document.querySelectorAll('.queue tbody tr').length === 2")
        row = page.text_content(".queue tbody tr")
        assert "gen-" in row and "a slot" in row and row.count(" s") >= 2
        until(page, "document.querySelector('.slots .figure').textContent.startsWith('4 of 4')")
        until(page, "document.querySelector('.slots canvas').ariaLabel.includes('4 of 4 slots running')")
        paced.step_s = 0.0
        for holder in holders:
            assert holder.result().endswith("data: [DONE]\n\n")


def test_errors_show_the_servers_message_and_text_is_never_run_as_html(browser: Any, paced: Paced) -> None:
    with opened(browser, paced.live) as page:
        write(page, "word " * 5000)
        refused = page.wait_for_selector(".facts.refused").text_content()
        assert "tokens" in refused and any(sign.isdigit() for sign in refused)
        write(page, "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>")
        page.wait_for_selector(".output .fresh")
        assert page.title() == "tokenteller" and "<img" in page.text_content(".paper .prompt")
        assert page.evaluate("document.querySelectorAll('.paper img, .paper script').length") == 0
    headers = CLIENT.get(paced.live.url + "/").headers
    assert "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in str(headers)


def test_a_narrow_dark_screen_needs_no_sideways_scrolling(browser: Any, paced: Paced) -> None:
    size = {"width": 320, "height": 800}
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, paced.live, viewport=size, is_mobile=True, has_touch=True, color_scheme="dark") as page:
        write(page, "JULIET:\n")
        page.wait_for_selector(".output .fresh")
        page.wait_for_selector(".memory .legend")
        for width in (320, 390, 820):
            page.set_viewport_size(size | {"width": width})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.evaluate(paper)
        page.click(".theme")
        until(page, f"{paper} !== '{dark}'")
        page.click(".theme")
        until(page, f"{paper} === '{dark}'")


def test_a_server_with_keys_asks_for_one_and_then_works(browser: Any, rand: Path) -> None:
    with serve(model=str(rand), slots=2, api_key="open-sesame") as live, opened(browser, live) as page:
        page.fill("#key", "open-barley")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key")
        page.fill("#key", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector(".state.ok")
        write(page, "ROMEO:\n")
        until(page, "document.querySelector('.facts').textContent.includes('seed')")


def test_the_vendored_files_are_the_pinned_ones() -> None:
    sums = [line.split() for line in (HERE / "vendor/SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in sums} == {"preact-htm.js", "uplot.js", "uplot.css", "LICENSES.txt"}
    for wanted, name in sums:
        assert hashlib.sha256((HERE / "vendor" / name).read_bytes()).hexdigest() == wanted
    licences = (HERE / "vendor/LICENSES.txt").read_text()
    assert "Apache License" in licences and licences.count("MIT") >= 2


def test_only_the_pages_own_file_types_are_served(live: Live) -> None:
    assert CLIENT.get(live.url + "/page/app.js").headers["content-type"].startswith("text/javascript")
    assert CLIENT.get(live.url + "/page/vendor/LICENSES.txt").status_code == 200
    for path in ("__init__.py", "vendor/fetch.sh", "..%2f__main__.py", "%2e%2e/app.py", "", "vendor"):
        assert CLIENT.get(live.url + "/page/" + path).status_code in (404, 405), path


def snapshots(live: Live, count: int) -> list[str]:
    with CLIENT.stream("GET", live.url + "/pool") as response:
        got = response.iter_lines()
        return [line for line in (next(got) for _ in range(2 * count)) if line]


def test_viewers_share_snapshots_and_none_is_taken_without_viewers(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    snapshot = pool_feed.snapshot
    monkeypatch.setattr(pool_feed, "snapshot", lambda *parts: (taken.append(time.monotonic()), snapshot(*parts))[1])
    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda _: snapshots(live, 4), range(8)))
    assert len(taken) < 16  # not 8 times 4
    assert len(set().union(*seen)) <= len(taken)
    time.sleep(3 * pool_feed.PERIOD_S)
    before = len(taken)
    time.sleep(3 * pool_feed.PERIOD_S)
    assert len(taken) == before


def test_one_viewer_too_many_is_refused(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_feed, "MAX_VIEWERS", 1)
    assert CLIENT.head(live.url + "/pool").status_code == 200
    with CLIENT.stream("GET", live.url + "/pool") as first:
        looking = first.iter_raw()  # dropping the iterator closes the connection
        next(looking)
        second = CLIENT.get(live.url + "/pool")
        assert second.status_code == 503 and second.headers["retry-after"] == "10"
    while len(snapshots_or_refusal(live)) != 1:
        time.sleep(0.05)


def snapshots_or_refusal(live: Live) -> list[str]:
    with CLIENT.stream("GET", live.url + "/pool") as response:
        return [next(response.iter_lines())] if response.status_code == 200 else []


def test_a_snapshot_shows_what_the_ledger_has(rand: Path) -> None:
    import orjson

    body: dict[str, Any] = {"prompt": "seen", "max_tokens": 240, "ignore_eos": True}
    with serve(0.004, model=str(rand), slots=8) as live, ThreadPoolExecutor(3) as threads:
        running = [threads.submit(stream_raw, live.url, **body) for _ in range(3)]
        seen = [orjson.loads(line.removeprefix("data: ")) for line in snapshots(live, 6)]
        for stream in running:
            stream.result()
    full = max(seen, key=lambda one: len(one["running"]))
    assert full["state"] == "ok" and full["slots"] == 8
    assert 0 < len(full["running"]) <= 3
    assert all(rows <= most for _, rows, most, *_ in full["running"])
    pool = full["pool"]
    assert max(full["demand"]["running"]) == pool["held"] + pool["owed"] <= pool["budget"]
