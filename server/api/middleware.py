"""What every request passes before its route: API key, CORS, request id, counting, the last resort for errors.

Plain ASGI on purpose: Starlette's BaseHTTPMiddleware buffers streams and hides disconnects.
"""

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

# Probes carry no key, and a browser needs the page before it can ask for one. Nothing here is secret.
PUBLIC_PATHS = ("/", "/health", "/ready")
PUBLIC_PREFIX = "/page/"

_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Middleware:
    """Checks the API key, serves HEAD wherever GET is served, ignores a trailing slash, sets X-Request-Id, counts
    responses, and answers unexpected exceptions with a 500 in the error format."""

    def __init__(self, app: ASGIApp, metrics: Metrics, keys: Sequence[str] = ()) -> None:
        self.app = app
        self.metrics = metrics
        self._key_digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _normalized(scope)
        client_id = safe_id(Headers(scope=scope))
        scope["state"]["request_id"] = client_id
        token = logs.request_id.set(client_id)
        response = ResponseRecorder(scope, send)
        try:
            self._check_key(scope)
            await self.app(scope, receive, response.send)
        except Unauthorized as error:
            await self._refuse(error, scope, receive, response.send)
        except Exception:
            if response.status:
                raise  # too late for a status: the HTTP server logs it and drops the connection
            log.exception("unexpected error", extra={"fields": {"path": scope["path"]}})
            await self._refuse(EngineFailure("unexpected error; see the server log"), scope, receive, response.send)
        finally:
            self.metrics.responded(route_pattern(scope), response.status)
            response.log()
            logs.request_id.reset(token)

    def _check_key(self, scope: Scope) -> None:
        """Raises Unauthorized. Its duration reveals nothing about the keys."""
        path = scope["path"]
        if not self._key_digests or path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        known = sum(hmac.compare_digest(digest, one) for one in self._key_digests)
        if scheme.lower() != "bearer" or not known:
            problem = "invalid API key" if key else "missing API key"
            raise Unauthorized(f"{problem}; send it as `Authorization: Bearer KEY`")

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.refused(error.code)
        scope["state"]["error_code"] = error.code
        await JSONResponse(error.body(), status_code=error.status, headers=error.headers())(scope, receive, send)


def _normalized(scope: Scope) -> Scope:
    """The scope as routes see it: HEAD is GET (the HTTP server drops the body), /path/ is /path.

    No redirect: its Location would be built from the client's own Host header, and many clients drop a POST body.
    """
    changes: dict[str, object] = {}
    if scope["method"] == "HEAD":
        changes = {"method": "GET", "head": True}
    if scope["path"].endswith("/"):
        changes["path"] = scope["path"].rstrip("/") or scope["path"]
    return {**scope, **changes} if changes else scope


class Cors(CORSMiddleware):
    """Allows these origins to call, with any request header and never with credentials."""

    def __init__(self, app: ASGIApp, metrics: Metrics, origins: Sequence[str]) -> None:
        expose = ["X-Request-Id", "Retry-After"]
        super().__init__(app, origins, ["GET", "POST"], ["*"], expose_headers=expose, allow_private_network=True)
        self.metrics = metrics

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        reason = bytes(response.body).decode()
        error = OriginRefused(f"{reason}: only GET and POST from the origins in --cors-origin are allowed")
        self.metrics.refused(error.code)
        return JSONResponse(error.body(), error.status, {"Vary": "Origin"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ResponseRecorder:
    """Wraps `send` of one request: records the status, adds the common headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self.status = 0  # until a response has started

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            headers.setdefault("X-Request-Id", self._scope["state"]["request_id"] or f"req-{secrets.token_hex(8)}")
        await self._send(message)

    def log(self) -> None:
        """Errors at INFO, everything else at DEBUG: a served generation has its own "request" line."""
        level = logging.DEBUG if 0 < self.status < 400 else logging.INFO
        if log.isEnabledFor(level):
            scope = self._scope
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": self.status,
                "code": scope["state"].get("error_code"),
                "client": scope["client"] and scope["client"][0],
                "total_s": time.monotonic() - self._began,
            }
            log.log(level, "http", extra={"fields": fields})


def route_pattern(scope: Scope) -> str:
    """The route's pattern as a metric label. Never the path itself: clients choose that, and series must not grow."""
    return getattr(scope.get("route"), "path", "none")


def safe_id(headers: Headers) -> str | None:
    """The client's X-Request-Id if it is safe to repeat in headers and logs."""
    id = headers.get("x-request-id", "")
    return id if _SAFE_ID.fullmatch(id) else None
