"""Server-sent events: the one encoder, and a response that always closes its stream."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_NON_ASCII = re.compile(r"[^\x00-\x7f]")


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def json_line(value: Any) -> bytes:
    """One line of ASCII JSON. Raw U+2028 or U+0085 would break clients that split lines by Unicode's rules."""
    encoded = orjson.dumps(value)
    if encoded.isascii():
        return encoded
    return _NON_ASCII.sub(_escape, encoded.decode()).encode()


def frame(value: Any) -> bytes:
    """One event: a data line and a blank line, LF only."""
    return b"data: " + json_line(value) + b"\n\n"


def comment(text: str) -> bytes:
    """A comment, which clients skip; it keeps the connection alive."""
    return b": " + text.encode("ascii", "replace").replace(b"\n", b" ") + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """Streams encoded frames. `close` runs however the response ends, also when the client disconnects."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(frames, headers=HEADERS | headers)
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()  # the garbage collector may finalize the generator much later
