"""The HTTP protocol of one connection: uvicorn's on httptools, which itself bounds neither a head nor its time, sends
chunks to HTTP/1.0 clients, and loses the body of a request that offers an upgrade."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenteller.server.errors import BadHead

HEAD_BYTES = 32 * 1024  # request line and headers together
HEAD_S = 20.0  # from its first byte, or from connecting, to the blank line


class Protocol(HttpToolsProtocol):
    """Refuses a head that is too long (431) or takes too long (408) and closes the connection; offers of an upgrade, as
    Java's and curl's clients make them, are not taken up; an HTTP/1.0 client gets plain bytes."""

    _head = 0  # bytes of the head so far
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._head_timer
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except HttpParserError:
            self._refuse("400 Bad Request", "this is no HTTP request")
        if self._head_timer is not None and self._head_timer is before:  # all of it belongs to an unfinished head
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self._too_long()

    def _parse(self, data: memoryview) -> None:
        """httptools ends a request that offers an upgrade with its head; a fresh parser gets the head without it."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as end:
                data = data[end.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method != b"CONNECT":
                fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
                self.parser.feed_data(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(fields)))

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._head_came()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_BYTES:
            self._too_long()
            raise ValueError("head too long")  # ends the parsing
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def _too_long(self) -> None:
        self._refuse("431 Request Header Fields Too Large", f"the head has more than {HEAD_BYTES} bytes")

    def _await_head(self) -> None:
        self._head = 0
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self._head:
            self._refuse("408 Request Timeout", f"no complete head within {HEAD_S:g} s")
        else:
            self.transport.close()  # nobody asked anything

    def _refuse(self, status: str, message: str) -> None:
        self._head_came()
        cycle = self.cycle
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete or not cycle.response_started):
            self.config.app.state.service.metrics.refused(BadHead.code)  # type: ignore[union-attr]
            body = json.dumps(BadHead(message).body())
            head = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}")
            self.transport.write("\r\n".join((*head, "Connection: close", "", body)).encode())
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """Has the response end where the connection does; HTTP/1.0 knows no chunks."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def plain(message: Any) -> None:
        if message["type"] == "http.response.body":  # as long as it will be
            more = message.get("more_body", False)
            cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]
