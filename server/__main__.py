"""The command line: tokenteller serve | plan | generate | bench. `python -m tokenteller.server` is the same."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from tokenteller.model.keys import ConfigError
from tokenteller.server import logs
from tokenteller.server.planning import make_plan, plan_text
from tokenteller.server.settings import (
    BenchSettings,
    GenerateSettings,
    ModelSettings,
    PlanSettings,
    ServeSettings,
    check_environment,
)

if TYPE_CHECKING:
    import httpx
    import uvicorn
    from fastapi import FastAPI

log = logging.getLogger("tokenteller")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 well, 1 could not do it, 2 wrong usage."""
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    commands = {"serve": _serve, "plan": _plan, "generate": _generate, "bench": _bench}
    if not arguments or arguments[0] not in commands:
        print(
            "usage: tokenteller {serve,plan,generate,bench} [options]   (--help after a command lists them)",
            file=sys.stderr,
        )
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        check_environment(os.environ)
        code = commands[arguments[0]](arguments[1:])
        sys.stdout.flush()
        return code
    except (ValidationError, SettingsError) as error:
        print(f"tokenteller: {_fault(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _silence()
        return 128 + signal.SIGPIPE
    except (ConfigError, ValueError, MemoryError, OSError) as error:
        print(f"tokenteller: {error}", file=sys.stderr)
        _silence()
        return 1


def _silence() -> None:
    """Nothing more is written to a stdout that takes nothing, not even at the end of the interpreter."""
    with suppress(io.UnsupportedOperation):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """/dev/null for those that are closed, before a socket or a file takes their place."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _fault(error: ValidationError | SettingsError) -> str:
    """What is wrong with the flags or the environment, in one line."""
    if isinstance(error, SettingsError):
        return str(error).splitlines()[0].removeprefix("error parsing CLI: ")
    fault = error.errors(include_url=False)[0]
    name = "--" + str(fault["loc"][0]).rstrip("_").replace("_", "-")
    got = "" if name == "--api-key" else f" (got {fault['input']!r})"
    return f"{name}: {fault['msg'].removeprefix('Value error, ')}{got}"


def _serve(arguments: list[str]) -> int:
    settings = CliApp.run(ServeSettings, cli_args=arguments)
    _check_certificate(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while it loads; PID 1 has no default action
    logs.set_up("json" if settings.explain_json else settings.log_format, settings.log_level)
    listeners = bind(settings.host, settings.port)
    plan = make_plan(settings)[2]
    announce(settings, plan_text(plan), "plan", {"pool_bytes": plan.pool_bytes, "weight_bytes": plan.weight_bytes})
    from tokenteller.server.api.app import create_app

    return run(create_app(settings), settings, listeners)


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host, so that a wrong one is told before anything is loaded. They refuse
    connections until they listen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host: {host} is no address: {error}") from None
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], bound[0].getsockname()[1] if bound else port, *address[2:]))
            bound.append(listener)
        except OSError as error:
            fault = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # localhost, and a system without IPv6
                bound.clear()
                break
    if not bound:
        raise ValueError(f"cannot listen on {_address(host, port)}: {fault.strerror}")
    return bound


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_certificate(settings: ServeSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile: it needs --ssl-certfile beside it")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"--ssl-certfile: {settings.ssl_certfile} cannot be used: {error}") from None


def run(app: FastAPI, settings: ServeSettings, listeners: list[socket.socket]) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second one ends it at once. Returns 0, or 1 where it failed.

    The sockets are bound and do not listen yet. Raises ValueError where another listens there by now.
    """
    import uvicorn

    from tokenteller.server.api.life import Drain

    class Server(uvicorn.Server):
        """uvicorn with our end in place of its own: it stays open for refusals until the drain is over."""

        drain: Drain

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.drain = Drain(app.state.service.streams, settings.shutdown_timeout)
            address = _address(*listeners[0].getsockname()[:2])
            url = f"{'https' if settings.ssl_certfile else 'http'}://{address}"
            announce(settings, f"\ntokenteller is ready on {url}", "ready", {"url": url, "model": settings.model})

        async def on_tick(self, counter: int) -> bool:
            if await super().on_tick(counter):
                return True
            if not self.drain.tick():
                return False
            self.config.timeout_graceful_shutdown = math.ceil(self.drain.seconds_left) + 1  # to read what was sent
            return True

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.started:
                self.drain.begin()
            else:
                sys.exit(0)

    server = Server(uvicorn_config(app, settings))
    _raise_file_limit()
    try:
        for listener in listeners:
            listener.listen(server.config.backlog)
    except OSError as error:  # two may be bound to a port until one of them listens
        raise ValueError(f"cannot listen on {_address(settings.host, settings.port)}: {error.strerror}") from None
    server.run(listeners)
    code = server.drain.exit_code if server.started else 1
    if server.started and app.state.service.engine.running:
        logging.shutdown()
        os._exit(code)  # its thread is stuck in native code, and would crash the interpreter's own end
    return code


def uvicorn_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """How our HTTP server is set up."""
    import uvicorn

    from tokenteller.server.api.protocol import Protocol

    return uvicorn.Config(
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


def _raise_file_limit() -> None:
    """A connection is an open file; the usual soft limit of 1,024 is less than what the kernel grants on asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wished:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))


def announce(settings: ServeSettings, text: str, event: str, fields: dict[str, Any]) -> None:
    """Text for people on stdout, or a JSON log line; a full disk or a closed pipe behind it is no reason to stop."""
    if settings.log_format == "json":
        log.info(event, extra={"fields": fields})
        return
    try:
        print(text, flush=True)
    except OSError:
        _silence()


def _plan(arguments: list[str]) -> int:
    settings = CliApp.run(PlanSettings, cli_args=arguments)
    plan = make_plan(settings)[2]
    print(json.dumps(plan.to_json()) if settings.json_ else plan_text(plan))
    return 0


def _bench(arguments: list[str]) -> int:
    settings = CliApp.run(BenchSettings, cli_args=arguments)
    from tokenteller.server.bench import bench, bench_text

    told = bench(settings)
    print(json.dumps(told) if settings.json_ else bench_text(told))
    return 0


def _generate(arguments: list[str]) -> int:
    import httpx

    settings = CliApp.run(GenerateSettings, cli_args=arguments)
    body = settings.model_dump(include={"prompt", "max_tokens", "temperature", "seed"}, exclude_none=True)
    headers = {"Authorization": f"Bearer {settings.api_key[0].get_secret_value()}"} if settings.api_key else {}
    with nullcontext(str(settings.url).rstrip("/")) if settings.url else _own_server(settings) as url:
        try:
            with httpx.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=None) as response:
                _print_text(response)
        except httpx.RequestError as error:
            raise ValueError(f"no server at {url} ({error}); start one with `tokenteller serve`") from error
        except (LookupError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            told = f"{url}/generate answered {response.status_code}, but not as tokenteller does"
            raise ValueError(told) from None
    return 0


def _print_text(response: httpx.Response) -> None:
    """Raises ValueError with the server's words; for what is none of ours, one of the errors of reading it."""
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
    raise LookupError("no end")


@contextmanager
def _own_server(settings: GenerateSettings) -> Iterator[str]:
    """A server with one slot in this process, for one answer."""
    import uvicorn

    from tokenteller.server.api.app import create_app

    chosen = settings.model_dump(include=set(ModelSettings.model_fields), exclude={"slots"})
    server = uvicorn.Server(uvicorn.Config(create_app(ServeSettings(**chosen, slots=1)), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
