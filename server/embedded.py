"""A server in a thread of a process that does other things too, which must not notice it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenteller.server.api.app import create_app
from tokenteller.server.api.http_server import HttpServer
from tokenteller.server.api.service import Service
from tokenteller.server.settings import ServeSettings

# For a server that only its own process is to reach, whatever the environment says about a public one.
LOOPBACK = {"host": "127.0.0.1", "port": 0, "ssl_certfile": None, "ssl_keyfile": None, "api_key": ()}

_starting = threading.Lock()


class EmbeddedServer:
    """Signal handlers, loggers and the garbage collector stay the host's; so does the number of threads torch uses."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._start_ended = threading.Event()
        self._failure: Exception | None = None
        self._server: HttpServer | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tokenteller", daemon=True)

    @property
    def service(self) -> Service:
        service: Service = self._app.state.service
        return service

    def start(self) -> None:
        """Returns once the server answers. Raises what kept it from starting."""
        self.listener = socket.create_server((self._settings.host, self._settings.port))
        scheme = "https" if self._settings.ssl_certfile else "http"
        self.url = "{}://{}:{}".format(scheme, *self.listener.getsockname())
        with _starting:  # one after the other, or one would take another's number of threads for the host's
            threads = torch.get_num_threads()
            try:
                self._thread.start()
                self._start_ended.wait()
                if self._failure is None:
                    # answered once the engine's thread runs, which by then has set torch's number of threads
                    self.service.engine.ask(lambda *_: None).result(timeout=10)
            finally:
                torch.set_num_threads(threads)  # what new threads of the host begin with
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Drains and ends: streams have `shutdown_timeout` seconds to finish. A second call does nothing."""
        self._stopping = True
        if self._server is not None:
            if self._server.drain is None:
                self._server.should_exit = True
            elif not self._server.should_exit:
                self._server.drain.begin()
        if self._start_ended.is_set():  # else interrupted while it loads, which nothing can hurry
            self._thread.join()

    def _run(self) -> None:
        try:
            self._app = create_app(self._settings)
            self._server = HttpServer(self._app, self._settings, self._start_ended.set)
            if not self._stopping:
                self._server.run([self.listener])
        except Exception as error:
            self._failure = error
        except SystemExit:  # uvicorn's way of saying so
            self._failure = RuntimeError("the app failed to start; the log has the reason")
        finally:
            self.listener.close()
            self._start_ended.set()


@contextmanager
def embedded(settings: ServeSettings) -> Iterator[EmbeddedServer]:
    """A running server until the block ends."""
    server = EmbeddedServer(settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
