"""The door: the layers around all routes. Plain ASGI, so that nothing is buffered and disconnects get through."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenteller.server import logs
from tokenteller.server.errors import ApiError, EngineFailure, OriginRefused, Unauthorized
from tokenteller.server.metrics import Metrics

log = logging.getLogger("tokenteller")

_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


OPEN_PATHS = ("/", "/health", "/ready")  # and the page's files: nothing there is secret, probes and browsers ask first
OPEN_PREFIX = "/page/"


class Door:
    """Asks for the API key, answers HEAD wherever GET is answered, gives every response an X-Request-Id, counts it, and
    turns what nobody foresaw into a 500 in the error form."""

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: Sequence[str] = ()) -> None:
        self.app = app
        self.metrics = metrics
        self._keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the HTTP server leaves the body out
            scope = dict(scope, method="GET", head=True)
        theirs = safe_id(Headers(scope=scope))
        scope["state"]["request_id"] = theirs
        token = logs.request_id.set(theirs)
        visit = Visit(scope, send)
        try:
            self._check_key(scope)
            await self.app(scope, receive, visit.send)
        except Unauthorized as error:
            await self._answer(error, scope, receive, visit.send)
        except Exception:
            if visit.status:
                raise  # too late for a status: the HTTP server logs it and cuts the connection
            log.exception("unexpected error", extra={"fields": {"path": scope["path"]}})
            await self._answer(EngineFailure("an unexpected error; the log has it"), scope, receive, visit.send)
        finally:
            self.metrics.responded(route(scope), visit.status)
            visit.log()
            logs.request_id.reset(token)

    def _check_key(self, scope: Scope) -> None:
        """Raises Unauthorized. How long it takes tells nothing about the keys."""
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        known = sum(hmac.compare_digest(digest, key) for key in self._keys)
        if scheme.lower() != "bearer" or not known:
            fault = "this API key is not known here" if given else "an API key is needed"
            raise Unauthorized(f"{fault}; send it as `Authorization: Bearer KEY`")

    async def _answer(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.refused(error.code)
        scope["state"]["error_code"] = error.code
        await JSONResponse(error.body(), status_code=error.status, headers=error.headers())(scope, receive, send)


class Origins(CORSMiddleware):
    """Lets pages of these origins call, with any header (clients send their own) and never with credentials."""

    def __init__(self, app: ASGIApp, metrics: Metrics, origins: Sequence[str]) -> None:
        expose = ["X-Request-Id", "Retry-After"]
        super().__init__(app, origins, ["GET", "POST"], ["*"], expose_headers=expose, allow_private_network=True)
        self.metrics = metrics

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        told = bytes(response.body).decode()
        error = OriginRefused(f"{told}: pages of the origins that --cors-origin names may call, by GET and POST")
        self.metrics.refused(error.code)
        return JSONResponse(error.body(), error.status, {"Vary": "Origin"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Visit:
    """One request on its way out: remembers the status, adds the id."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self.status = 0  # no answer was begun

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            headers.setdefault("X-Request-Id", self._scope["state"]["request_id"] or f"req-{secrets.token_hex(8)}")
        await self._send(message)

    def log(self) -> None:
        """A line for what was refused or failed; what went well is told elsewhere, or of no interest."""
        fine = 0 < self.status < 400
        if log.isEnabledFor(logging.DEBUG if fine else logging.INFO):
            scope = self._scope
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": self.status,
                "code": scope["state"].get("error_code"),
                "client": scope["client"] and scope["client"][0],
                "total_s": time.monotonic() - self._began,
            }
            log.log(logging.DEBUG if fine else logging.INFO, "http", extra={"fields": fields})


def route(scope: Scope) -> str:
    """The route's own pattern, never what the client wrote: a label of few values."""
    return getattr(scope.get("route"), "path", "none")


def safe_id(headers: Headers) -> str | None:
    """The client's own X-Request-Id where it is harmless in a header and a log line."""
    theirs = headers.get("x-request-id", "")
    return theirs if _SAFE_ID.fullmatch(theirs) else None
