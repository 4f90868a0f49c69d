"""The HTTP protocol of one connection: uvicorn's on httptools, with what that leaves out.

It limits neither the size of a request head nor the time it takes, sends chunked responses to HTTP/1.0 clients, and
drops the body of a request that offers an upgrade.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenteller.server.errors import BadHead

HEAD_BYTES = 32 * 1024  # request line and headers
HEAD_S = 20.0  # from the first byte, or from connecting, to the blank line


class Protocol(HttpToolsProtocol):
    """Refuses heads that are malformed (400), too long (431) or too slow (408) and closes the connection.

    A bad head behind a request that is still being answered waits for that answer: it must not cut a running stream.
    Upgrades, which Java's client and curl offer, are declined. A client that closes only its sending side counts as
    gone: nothing tells it from one that has closed the connection, whose slot must come free at once.
    """

    _head = 0  # bytes of the head so far
    _head_timer: asyncio.TimerHandle | None = None
    _refusal: tuple[str, str] | None = None  # to be sent once the running response is complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return  # what follows a bad head has no meaning
        timer = self._head_timer
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except HttpParserError:
            self._refuse("400 Bad Request", "not an HTTP request")
        if self._head_timer is not None and self._head_timer is timer:  # all of the data belongs to an open head
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self._too_long()

    def _parse(self, data: memoryview) -> None:
        """httptools ends a request at a head that offers an upgrade. A new parser gets the head without the offer."""
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
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
                self.parser.feed_data(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(fields)))

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()
            self._head = 1

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._stop_head_timer()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_BYTES:
            self._too_long()
            raise ValueError("head too long")  # stops the parser
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal and not self._answering():
            self._refuse(*self._refusal)

    def _answering(self) -> bool:
        """Whether a complete request still waits for the rest of its response."""
        cycle = self.cycle  # of the request that came last; those in the pipeline come after one that is running
        running = cycle is not None and not cycle.response_complete
        return bool(self.pipeline) or (running and (cycle.response_started or not cycle.more_body))

    def _too_long(self) -> None:
        self._refuse("431 Request Header Fields Too Large", f"the request head has more than {HEAD_BYTES} bytes")

    def _expect_head(self) -> None:
        self._head = 0
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self._head:
            self._refuse("408 Request Timeout", f"the request head was incomplete after {HEAD_S:g} s")
        else:
            self.transport.close()  # a connection without a request

    def _refuse(self, status: str, message: str) -> None:
        self._stop_head_timer()
        if self._answering():
            self._refusal = self._refusal or (status, message)
            return
        if not self.transport.is_closing():
            self.config.app.state.service.metrics.refused(BadHead.code)  # type: ignore[union-attr]
            body = json.dumps(BadHead(message).body())
            head = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}")
            self.transport.write("\r\n".join((*head, "Connection: close", "", body)).encode())
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """Ends the response by closing the connection; HTTP/1.0 has no chunked encoding."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def plain(message: Any) -> None:
        if message["type"] == "http.response.body":  # uvicorn insists on knowing the length
            more = message.get("more_body", False)
            cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]
