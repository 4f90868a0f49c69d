"""One request on the wire: its chunks with their arrival times. Nothing is parsed here."""

from __future__ import annotations

import asyncio
import re
import ssl
from argparse import Namespace
from dataclasses import dataclass, field
from time import perf_counter

import httpx


@dataclass
class Transfer:
    """Every chunk with its arrival, and what went wrong with the connection, if anything."""

    sent: float = 0.0  # when the last byte of the request was written; 0 if it never was
    status: int = 0
    retry_after: str = ""
    fault: str = ""
    detail: str = ""
    stamps: list[float] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.chunks).decode(errors="replace")


async def transfer(client: httpx.AsyncClient, request: httpx.Request, timeout: float) -> Transfer:
    """Sends a request and stamps each chunk. Parsing it here would make the stamps of other streams late."""
    wire = Transfer()

    async def trace(event: str, _: object) -> None:
        if event.endswith("send_request_body.complete"):
            wire.sent = perf_counter()

    request.extensions["trace"] = trace
    try:
        async with asyncio.timeout(timeout):
            response = await client.send(request, stream=True)
            wire.status, wire.retry_after = response.status_code, response.headers.get("retry-after", "")
            try:
                async for chunk in response.aiter_raw():
                    wire.stamps.append(perf_counter())
                    wire.chunks.append(chunk)
            finally:
                await response.aclose()
    except TimeoutError:
        wire.fault, wire.detail = "timeout", f"no end after {timeout:g} s"
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        wire.fault, wire.detail = "connect_error", str(error) or type(error).__name__
    except httpx.HTTPError as error:
        wire.fault, wire.detail = "cut_stream" if wire.status else "no_reply", str(error) or type(error).__name__
    return wire


def connect(options: Namespace) -> httpx.AsyncClient:
    """A client without a limit on connections. It closes idle ones before a server does (uvicorn: after 5 s)."""
    headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"} | _authorization(options)
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    return httpx.AsyncClient(
        limits=limits, timeout=None, headers=headers, trust_env=False, verify=_certificates(options)
    )


def _authorization(options: Namespace) -> dict[str, str]:
    return {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}


def _certificates(options: Namespace) -> ssl.SSLContext | bool:
    """Honours SSL_CERT_FILE. Reading the system's certificates takes 50 ms, so not without TLS."""
    return httpx.create_ssl_context() if options.url.startswith("https") else False


def first_model(options: Namespace) -> str:
    """The first name that /v1/models lists. Raises LookupError."""
    url = re.sub(r"(/chat)?/completions$", "/models", options.target)
    headers, verify = _authorization(options), _certificates(options)
    try:
        reply = httpx.get(url, headers=headers, trust_env=False, verify=verify, timeout=30)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise LookupError(f"no model name from {url} ({error}); give it with --model") from None
