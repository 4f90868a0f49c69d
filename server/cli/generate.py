"""tokenteller generate: one answer, from a running server or from one started for it in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import httpx

from tokenteller.server.cli.parse import parse
from tokenteller.server.settings import GenerateSettings, LoadSettings, ServeSettings


def run(arguments: list[str]) -> int:
    settings = parse("generate", GenerateSettings, arguments, positional="prompt")
    body = settings.model_dump(include={"prompt", "max_tokens", "temperature", "seed"}, exclude_none=True)
    headers = {"Authorization": f"Bearer {settings.api_key[0].get_secret_value()}"} if settings.api_key else {}
    with nullcontext(str(settings.url).rstrip("/")) if settings.url else own_server(settings) as url:
        try:
            with httpx.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=None) as response:
                _print_text(response)
        except httpx.RequestError as error:
            raise ValueError(f"no server at {url} ({error}); start one with `tokenteller serve`") from error
        except (LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{url} is not tokenteller: /generate answered {response.status_code}") from None
    return 0


def _print_text(response: httpx.Response) -> None:
    """Raises ValueError with the server's message; LookupError, TypeError or a decoding error if it is another one."""
    if response.status_code != 200:
        raise ValueError(json.loads(response.read())["error"]["message"])
    for line in response.iter_lines():
        if line == "data: [DONE]":
            print()
            return
        if line.startswith("data: "):
            frame = json.loads(line[6:])
            if frame["type"] == "error":
                raise ValueError(frame["error"]["message"])
            print(frame.get("text", ""), end="", flush=True)
    raise LookupError("the stream ended without [DONE]")


@contextmanager
def own_server(settings: LoadSettings) -> Iterator[str]:
    """The URL of a server with one slot, in a thread of this process, for as long as the block runs."""
    from tokenteller.server.embedded import LOOPBACK, embedded

    chosen = settings.model_dump(include=set(LoadSettings.model_fields), exclude={"slots"})
    with embedded(ServeSettings(**chosen, slots=1).model_copy(update=LOOPBACK)) as server:
        yield server.url
