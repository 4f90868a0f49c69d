"""uvicorn as we run it: with our protocol, and our drain in place of its own shutdown."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tokenteller.server.api.lifecycle import Drain
from tokenteller.server.api.protocol import Protocol
from tokenteller.server.settings import ServeSettings


class HttpServer(uvicorn.Server):
    """Keeps its sockets open, to refuse with a reason, until the drain is over. `ready` is called once it accepts."""

    def __init__(self, app: FastAPI, settings: ServeSettings, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                http=Protocol,
                ws="none",
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )
        self._app = app
        self._shutdown_timeout = settings.shutdown_timeout
        self._ready = ready
        self.drain: Drain | None = None

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self.drain = Drain(self._app.state.service.streams, self._shutdown_timeout)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        assert self.drain is not None
        if not self.drain.tick():
            return False
        self.config.timeout_graceful_shutdown = math.ceil(self.drain.seconds_left) + 1  # to read what was sent
        return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.drain is None:
            sys.exit(0)
        self.drain.begin()
