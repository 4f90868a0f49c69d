"""tokenteller chat, in a script and on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import tape
from conftest import CHATML
from live import Live, serve

COMMAND = [sys.executable, "-m", "tokenteller.server", "chat"]
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 20


def script(lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--temperature", "0", *flags]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=100, check=False)


class Terminal:
    """A process on a terminal of its own: what is typed, and what it shows."""

    def __init__(self, *flags: str) -> None:
        self._master, self._slave = pty.openpty()
        opened = 'exec "$@" <>"$0" >&0 2>&1'  # a session's first process takes the terminal that it opens as its own
        command = ["sh", "-c", opened, os.ttyname(self._slave), *COMMAND, "--temperature", "0", *flags]
        self._popen = subprocess.Popen(command, start_new_session=True, env=os.environ | {"TERM": "dumb"})
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """What is shown up to and with this text, from where the last call ended."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self._master], [], [], end - time.monotonic())[0], f"{text!r} not in {self.shown!r}"
            self.shown += os.read(self._master, 4096).decode()
        found, self.shown = self.shown[: self.shown.index(text) + len(text)], self.shown.split(text, 1)[1]
        return found

    def exit_code(self) -> int:
        return self._popen.wait(20)

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def terminal(*flags: str) -> Iterator[Terminal]:
    opened = Terminal(*flags)
    try:
        opened.wait_for("> ")
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Plays letters, one each 10 ms, as long as it is let; 512 tokens of context, a chat template."""
    directory = tape(tmp_path_factory.mktemp("models") / "letters", LETTERS[:512], context=512)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    with serve(pace=0.01, model=str(directory), slots=2) as live:
        yield live


def test_a_script_gets_an_answer_for_each_line_that_continues_the_conversation(server: Live) -> None:
    result = script("one\n\ntwo\n/reset\none\n/exit\nnever\n", "--url", server.url, "--max-tokens", "5")
    assert result.returncode == 0 and result.stderr == "(forgotten)\n"
    first, second, third = result.stdout.splitlines()
    asked = [{"role": "user", "content": "one"}]
    then = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    for messages, answer in ((asked, first), (then, second)):
        body = {"messages": messages, "max_tokens": 5, "temperature": 0}
        told = server.post("/v1/chat/completions", **body).json()
        assert answer == told["choices"][0]["message"]["content"]
    assert first == third != second


def test_the_system_text_comes_first_and_v1_may_stand_in_the_url(server: Live) -> None:
    body = {"max_tokens": 5, "temperature": 0}
    body["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    told = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    result = script("one\n", "--url", server.url + "/v1/", "--max-tokens", "5", "--system", "Be brief.")
    assert result.stdout == told + "\n"


def test_an_interrupt_stops_the_answer_frees_its_slot_and_the_conversation_goes_on(server: Live) -> None:
    with terminal("--url", server.url) as chat:
        for _ in range(2):
            chat.type("go on\n")
            chat.wait_for("abc")
            assert server.load() == (1, 0)
            chat.type("\x03")
            chat.wait_for("\n> ")
            server.wait_idle(2.0)
        chat.type("never sent\x03")  # at the prompt it drops the line
        chat.wait_for("\n> ")
        chat.type("/exit\n")
        assert chat.exit_code() == 0


def test_the_end_of_input_leaves_and_the_arrow_brings_back_what_was_typed(server: Live) -> None:
    with terminal("--url", server.url, "--max-tokens", "3") as chat:
        chat.type("one\n")
        chat.wait_for("\n> ")
        chat.type("\x10")  # Ctrl-P, which is the arrow up on any terminal
        chat.wait_for("one")
        chat.type("\n")
        chat.wait_for("\n> ")
        chat.type("\x04")
        assert chat.exit_code() == 0


def test_when_the_context_is_full_the_oldest_turns_are_forgotten_and_that_is_said(server: Live) -> None:
    lines = "".join(f"{'long ' * 20}{at}\n" for at in range(6))
    result = script(lines, "--url", server.url, "--max-tokens", "80")
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 6
    assert "(the context is full: the oldest turn is forgotten)" in result.stderr


def test_an_answer_gets_the_room_that_is_left_and_a_question_without_room_is_refused(server: Live) -> None:
    assert len(script("one\n", "--url", server.url).stdout) > 400  # the context has no room for 1,024
    result = script(f"{'x' * 600}\none\n", "--url", server.url)
    assert result.returncode == 1 and "shorten the prompt by" in result.stderr and not result.stdout
    with terminal("--url", server.url, "--max-tokens", "3") as chat:
        chat.type("x" * 600 + "\n")
        chat.wait_for("shorten the prompt by")
        chat.wait_for("> ")
        chat.type("one\n")
        chat.wait_for("\n> ")


def test_without_a_chat_template_lines_are_continued_as_plain_text_and_that_is_said_once(rand: Path) -> None:
    with serve(model=str(rand), slots=1) as live:
        result = script("one\ntwo\n", "--url", live.url, "--max-tokens", "5", "--system", "s")
        assert result.returncode == 0 and result.stderr.count("has no chat template") == 1
        first = live.text("s\none", max_tokens=5, temperature=0)
        second = live.text(f"s\none{first}\ntwo", max_tokens=5, temperature=0)
        assert result.stdout == f"{first}\n{second}\n"


def test_without_a_url_the_model_is_loaded_here(rand: Path) -> None:
    result = script("one\n", "--model", str(rand), "--max-tokens", "5")
    assert result.returncode == 0 and len(result.stdout) > 1


def test_an_interrupt_spares_the_server_that_runs_in_the_same_process() -> None:
    with terminal("--model", "toy", "--max-tokens", "900", "--max-context", "1024") as chat:
        for _ in range(2):  # the second waits for the one slot that there is
            chat.type("Speak.\n")
            chat.wait_for("Speak.")
            chat.wait_for("e")
            chat.type("\x03")
            chat.wait_for("\n> ")
        chat.type("\x04")
        assert chat.exit_code() == 0


@pytest.mark.parametrize(("url", "told"), [("http://127.0.0.1:9", "no server at"), ("", "does not speak")])
def test_what_is_no_server_is_one_line_and_exit_code_1(url: str, told: str, server: Live) -> None:
    result = script("one\n", "--url", url or server.url + "/plan?")
    assert result.returncode == 1 and told in result.stderr and len(result.stderr.splitlines()) == 1


def test_an_interrupt_ends_a_script(server: Live) -> None:
    with subprocess.Popen([*COMMAND, "--url", server.url], stdin=-1, stdout=-1, text=True) as popen:
        assert popen.stdin is not None and popen.stdout is not None
        popen.stdin.write("one\n")
        popen.stdin.flush()
        assert popen.stdout.read(3) in LETTERS
        popen.send_signal(signal.SIGINT)
        assert popen.wait(20) == 128 + signal.SIGINT
    server.wait_idle()
