"""Turns the answer of any protocol into an HTTP response: streamed, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response

from tokenteller.server.api import sse
from tokenteller.server.api.service import request_id

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody is left to read it, but metrics and log show it


class Answer(Protocol):
    """What a protocol makes of its streams."""

    id: str

    def frames(self) -> AsyncIterator[bytes]:
        """The answer as encoded SSE frames. A failure becomes the last frame."""

    async def fold(self) -> dict[str, Any]:
        """The answer as one JSON object. Raises ApiError for a failure."""

    def close(self) -> None:
        """Cancels whatever still runs."""


async def respond(request: Request, answer: Answer, *, stream: bool) -> Response:
    headers = {"X-Request-Id": request_id(request, answer.id)}
    if stream:
        return sse.EventStreamResponse(answer.frames(), answer.close, headers)
    try:
        whole = await _unless_disconnected(request, answer.fold())
    finally:
        answer.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else json_response(whole, headers)


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(sse.json_line(value), media_type="application/json", headers=headers)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client disconnects first, and `work` is cancelled."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
