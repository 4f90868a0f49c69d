"""tokenteller chat: a conversation in the terminal, with a running server or with a model loaded for it here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import httpx

from tokenteller.server.cli.generate import own_server
from tokenteller.server.cli.parse import parse
from tokenteller.server.settings import ChatSettings

ROOM = 1024  # tokens an answer may have where --max-tokens does not say
LEAST_ROOM = 64  # where less than this is left of the context, the oldest turn is dropped
HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a model writes must not steer the terminal


def run(arguments: list[str]) -> int:
    settings = parse("chat", ChatSettings, arguments)
    url = str(settings.url).rstrip("/").removesuffix("/v1") if settings.url else None
    headers = {"Authorization": f"Bearer {settings.api_key[0].get_secret_value()}"} if settings.api_key else {}
    with nullcontext(url) if url else own_server(settings) as url:
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=10.0)) as client:
                _talk(Conversation(client, settings))
        except httpx.RequestError as error:
            raise ValueError(f"no server at {url} ({error}); start one with `tokenteller serve`") from error
    return 0


def _talk(conversation: Conversation) -> None:
    """Until /exit or the end of stdin. On a terminal an interrupt or an error ends the answer; in a script, all."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):  # not every Python has it
            import readline  # noqa: F401  gives input() editing and history
        note(f"{conversation.model}: {HELP}")
    while True:
        try:
            line = input("> " if on_terminal else "")
            if line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                conversation.turns.clear()
                note("forgotten")
            elif line.strip():
                _print_answer(conversation, line)
        except EOFError:
            if on_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
        except (ValueError, httpx.RequestError) as error:
            if not on_terminal:
                raise
            note(str(error))


def _print_answer(conversation: Conversation, line: str) -> None:
    question = line.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are not UTF-8
    with closing(conversation.answer(question)) as pieces:
        for piece in pieces:
            print(_CONTROL.sub("\ufffd", piece), end="", flush=True)
    print()


def note(text: str) -> None:
    """To the user, and not part of the conversation."""
    print(f"({text})", file=sys.stderr, flush=True)


class Conversation:
    """What was said so far, and how to ask for more. `plain` once the model proved to have no chat template."""

    def __init__(self, client: httpx.Client, settings: ChatSettings) -> None:
        self._client = client
        self._system = settings.system
        self._options = settings.model_dump(include={"temperature", "seed"}, exclude_none=True)
        self._room = settings.max_tokens or ROOM
        self.plain = False
        self.turns: list[tuple[str, str]] = []  # what the user said, what was answered
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise ValueError(_error(response)["message"])
        try:
            self.model = str(response.json()["data"][0]["id"])
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"{client.base_url} does not speak the OpenAI protocol") from None

    def answer(self, question: str) -> Generator[str, None, None]:
        """The answer as it comes. Of one that is given up half-way, what came of it counts as said."""
        said = ""
        with self._ask(question) as response:
            try:
                for event in _events(response):
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        piece = (choice["text"] if self.plain else choice["delta"].get("content")) or ""
                        said += piece
                        yield piece
            except (KeyboardInterrupt, GeneratorExit):
                self.turns.append((question, said))
                raise
        self.turns.append((question, said))

    @contextmanager
    def _ask(self, question: str) -> Iterator[httpx.Response]:
        """The open stream of an answer; closing it cancels the request. Drops the oldest turns if all do not fit."""
        room, dropped = self._room, 0
        while True:
            path, body = self._request(question, room)
            with self._client.stream("POST", path, json=body) as response:
                if response.status_code == 200:
                    if dropped:
                        turns = "turn is" if dropped == 1 else f"{dropped} turns are"
                        note(f"the context is full: the oldest {turns} forgotten")
                    yield response
                    return
                error = _error(response)
            fits = error.get("max_tokens_that_fits", 0)
            if not self.plain and "no chat template" in error["message"]:
                self.plain = True
                note(f"{self.model} has no chat template: it continues what you write as plain text")
            elif error.get("code") != "context_length_exceeded":
                raise ValueError(error["message"])
            elif min(room, LEAST_ROOM) <= fits < room:
                room = fits
            elif self.turns:
                del self.turns[0]
                dropped += 1
            elif 0 < fits < room:
                room = fits
            else:
                raise ValueError(error["message"])

    def _request(self, question: str, room: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "stream": True, "max_tokens": room, **self._options}
        if self.plain:
            before = [self._system] if self._system else []
            return "/v1/completions", body | {"prompt": "\n".join([*before, *map("".join, self.turns), question])}
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for asked, said in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        messages.append({"role": "user", "content": question})
        return "/v1/chat/completions", body | {"messages": messages}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each SSE event up to [DONE]. Raises ValueError for a stream that ends without it."""
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
    raise ValueError("the answer was cut off: the server closed the connection")


def _error(response: httpx.Response) -> dict[str, Any]:
    """The error object of a refusal, with a message in any case."""
    try:
        error: dict[str, Any] = json.loads(response.read())["error"]
        return {"message": str(error["message"])} | error
    except (LookupError, TypeError, ValueError):
        return {"message": f"{response.request.url} answered {response.status_code}"}
