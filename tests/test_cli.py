"""The command line in its own process: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import random_llama
from fastapi import FastAPI
from live import Live, process

from tokenteller.server.__main__ import main
from tokenteller.server.cli.listen import bind
from tokenteller.server.cli.serve import serve
from tokenteller.server.settings import ServeSettings

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenteller.server", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_without_flags_the_toy_is_served_until_sigterm() -> None:
    with process("--threads", "1") as server:
        answer = httpx.post(f"{server.url}/generate", json={"prompt": "To be", "stream": False}, timeout=30).json()
        assert answer["kv"]["bytes_per_token"] == 2048
        assert answer["usage"]["completion_tokens"] >= 1
        server.signal()
        assert server.exit_code() == 0


@pytest.mark.parametrize("closed", ["--log-format json <&- 2>&1 >&-", "2>&-"])
def test_it_serves_with_standard_streams_closed(rand: Path, closed: str) -> None:
    command = f"exec {sys.executable} -m tokenteller.server serve --model {rand} --port 0 {closed}"
    with subprocess.Popen(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        url = next(match[0] for line in popen.stdout if (match := re.search(r"http://[\d.:]+", line)))
        assert httpx.post(f"{url}/generate", json={"prompt": "x", "stream": False}).status_code == 200
        popen.terminate()
        assert popen.wait(20) == 0


def test_once_it_serves_garbage_is_collected_again_but_for_what_was_loaded() -> None:
    code = (
        "import gc, sys; gc.disable(); from tokenteller.server.api.app import settle_process; settle_process()\n"
        "sys.exit(not (gc.isenabled() and gc.get_freeze_count() > 10_000))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_plan_prints_the_same_numbers_as_json(rand: Path) -> None:
    text, raw = run("plan", "--model", str(rand)), run("plan", "--model", str(rand), "--json")
    plan = json.loads(raw.stdout)
    assert text.returncode == raw.returncode == 0
    assert plan["bytes_per_token"] == 512 and "512 bytes per token" in text.stdout


def test_a_pool_too_small_for_one_sequence_is_refused_before_weights_are_read(rand: Path) -> None:
    result = run("serve", "--port", "0", "--model", str(rand), "--kv-memory", "10KiB")
    assert result.returncode == 1
    assert "10 KiB" in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "word"),
    [
        (["serve", "--slots", "0"], {}, "--slots"),
        (["serve", "--kv-memory", "lots"], {}, "not a size"),
        (["serve", "--no-such-flag", "1"], {}, "no-such-flag"),
        (["serve", "extra"], {}, "extra"),
        (["serve", "--api-key", ""], {}, "--api-key"),
        (["generate"], {}, "PROMPT"),
        (["generate", "a\udcff"], {}, "--prompt: 'utf-8' codec can't decode byte 0xff in position 1"),
        (["bench", "--streams", "1,,2"], {}, "--streams:"),
        (["serve"], {"TOKENTELLER_PORT": "http"}, "--port"),
        (["plan"], {"TOKENTELLER_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        (["generate", "x"], {"TOKENTELLER_PORT": "http"}, "--port"),
        (["generate", "x", "--url", "localhost:8000"], {}, "--url"),
        (["generate", "x", "--url", "http://["], {}, "--url"),
        (["bench"], {"TOKENTELLER_PORT": "http"}, "--port"),
        (["plan", "--memory", "1GiB", "--kv-memory", "1MiB"], {}, "--memory and --kv-memory"),
        (["plan", "--max-context", "5000"], {}, "--max-context 5000"),
        (["serve", "--port", "0", "--max-context", "5000"], {}, "--max-context 5000"),
        (["plan", "--weights", "int4", "--device", "cuda"], {}, "--weights int4: needs the CPU, not cuda"),
        (["plan"], {"TOKENTELLER_KV_MEMROY": "8MiB"}, "did you mean TOKENTELLER_KV_MEMORY?"),
        (["frobnicate"], {}, "usage"),
        (["serve", "--speculate", "4"], {}, "--speculate is now --draft-tokens"),
        (["serve", "--explain-json"], {}, "is now --explain with --log-format json"),
        (["serve", "--bypass-limit=4"], {}, "--bypass-limit is gone"),
        (
            ["plan"],
            {"TOKENTELLER_STREAM_BUFFER": "9"},
            "TOKENTELLER_STREAM_BUFFER: no such setting; --stream-buffer is",
        ),
        (["serve", "--served-model-name", ""], {}, "--served-model-name"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], environment: dict[str, str], word: str) -> None:
    result = run(*arguments, **environment)
    assert result.returncode == 2
    assert word in result.stderr and result.stderr.count("\n") == 1


def test_only_prefixed_variables_count_and_those_that_are_empty_or_of_another_command_are_ignored(rand: Path) -> None:
    result = run("plan", "--model", str(rand), JSON="1", TOKENTELLER_PORT="http", TOKENTELLER_SLOTS="")
    assert result.returncode == 0 and "fit at once" in result.stdout
    assert json.loads(run("plan", "--model", str(rand), TOKENTELLER_JSON="1").stdout)["fits"]


def test_a_missing_model_is_one_line_and_exit_code_1() -> None:
    result = run("serve", "--port", "0", "--model", "/nowhere")
    assert result.returncode == 1
    assert "/nowhere" in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_reported_before_the_model_is_looked_at(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--model", "/nowhere", "--host", host, "--port", str(port))
    assert result.returncode == 1
    assert result.stderr == f"tokenteller: cannot listen on {host}:{port}: Address already in use\n"


def test_a_bad_tokenizer_is_reported_before_weights_are_read(tmp_path: Path) -> None:
    directory = random_llama(tmp_path)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    result = run("serve", "--model", str(directory), "--port", "0")
    assert result.returncode == 1
    assert "tokenizer.json" in result.stderr and result.stderr.count("\n") == 1  # no progress of weights


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ssl-certfile", "/nowhere.pem"], "--ssl-certfile: Path does not point to a file (got '/nowhere.pem')"),
        (["--ssl-keyfile", __file__], "--ssl-keyfile: needs --ssl-certfile, too"),
        (["--ssl-certfile", __file__], f"--ssl-certfile: {__file__} cannot be used"),
        (["--api-key", "@/nowhere"], "--api-key: cannot read keys from /nowhere"),
    ],
)
def test_keys_and_certificates_are_read_before_the_model_is_looked_at(flags: list[str], said: str) -> None:
    result = run("serve", "--model", "/nowhere", "--port", "0", *flags)
    assert result.returncode == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("host", "code"), [("a..b", 2), ("192.0.2.1", 1)])
def test_an_address_of_another_machine_is_reported_before_the_model_is_looked_at(host: str, code: int) -> None:
    result = run("serve", "--port", "0", "--model", "/nowhere", "--host", host)
    assert result.returncode == code
    assert host in result.stderr and "/nowhere" not in result.stderr and result.stderr.count("\n") == 1


def test_a_second_server_on_a_port_is_refused_while_the_first_one_still_loads() -> None:
    (one,) = bind("127.0.0.1", 0)
    with one:
        port = one.getsockname()[1]
        result = run("serve", "--model", "/nowhere", "--port", str(port))
    said = f"cannot listen on 127.0.0.1:{port}: another tokenteller is starting or running there"
    assert (result.returncode, result.stderr) == (1, f"tokenteller: {said}\n")


def test_another_program_that_began_to_listen_meanwhile_is_reported() -> None:
    settings = ServeSettings()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        (other,) = bind("127.0.0.1", one.getsockname()[1])
        one.listen()
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address"):
            serve(FastAPI(), settings, [other])


def test_all_addresses_of_a_host_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    one, two = (listener.getsockname() for listener in bind("several", 0))  # that which is not ours is left out
    assert (one[0], two[0]) == ("127.0.0.1", "127.0.0.2") and one[1] == two[1] > 0


def test_ipv6_is_served(rand: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with process("--model", str(rand), "--host", "::1") as server:
        assert server.url.startswith("http://[::1]:") and server.status("/health") == 200


def test_generate_streams_from_a_running_server(live: Live) -> None:
    result = run("generate", "hi", "--url", f"{live.url}/", "--seed", "1", "--max-tokens", "9")
    assert result.returncode == 0
    assert result.stdout == live.text("hi", seed=1, max_tokens=9) + "\n"


def test_generate_without_a_server_starts_its_own(rand: Path, live: Live) -> None:
    result = run("generate", "hi", "--model", str(rand), "--seed", "1", "--max-tokens", "9", TOKENTELLER_SLOTS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == live.text("hi", seed=1, max_tokens=9) + "\n"


@pytest.mark.parametrize(("prompt", "said"), [("hi", "at most 254"), ("", "prompt: it has no tokens")])
def test_generate_shows_why_the_server_refused(live: Live, prompt: str, said: str) -> None:
    result = run("generate", prompt, "--url", live.url, "--max-tokens", "999")
    assert result.returncode == 1 and said in result.stderr


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (404, b'{"detail": "Not Found"}'),
        (404, b'{"error": "not here"}'),
        (404, b"[]"),
        (502, b"<html>Bad Gateway</html>"),
        (400, b"\xff"),
        (307, b""),
        (200, b"<html>Welcome</html>"),
        (200, b'data: {"object": "chunk"}\n\ndata: [DONE]\n\n'),
        (200, b'data: ["x"]\n\n'),
        (200, b"data: {cut\n\n"),
    ],
)
def test_generate_recognises_a_server_of_another_kind(
    status: int, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["generate", "hi", "--url", url]) == 1
    said = capsys.readouterr().err
    assert said == f"tokenteller: {url} is not tokenteller: /generate answered {status}\n"


@pytest.mark.parametrize("command", ["plan", "generate x --max-tokens 9"])
@pytest.mark.parametrize(("to", "code", "said"), [("> /dev/full", 1, "No space left"), ("| head -c 0", 141, "")])
def test_an_output_that_cannot_be_written_gives_no_traceback(
    rand: Path, command: str, to: str, code: int, said: str
) -> None:
    line = f"set -o pipefail; {sys.executable} -m tokenteller.server {command} --model {rand} {to}"
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == code
    assert said in result.stderr and result.stderr.count("\n") == bool(said)
