"""tokenteller serve: checks what can be checked, plans, loads, then serves until SIGTERM."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import ssl
import sys
from typing import TYPE_CHECKING, Any

from pydantic_settings import SettingsError

from tokenteller.model.machine import usable_cpus
from tokenteller.server import logs
from tokenteller.server.cli.listen import Listener, address_text, bind, listen
from tokenteller.server.cli.parse import parse
from tokenteller.server.cli.terminal import silence_stdout
from tokenteller.server.planning import Plan, make_plan, plan_text, threads_text
from tokenteller.server.settings import ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("tokenteller")


def run(arguments: list[str]) -> int:
    settings = parse("serve", ServeSettings, arguments)
    _check_certificate(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while it loads; process 1 has no default action
    logs.set_up(settings.log_format, settings.log_level)
    listeners = bind(settings.host, settings.port)
    plan = make_plan(settings)
    _announce_plan(settings, plan)
    gc.disable()  # until settle_process: looking for garbage takes a sixth of the time of importing and loading
    if settings.device == "cpu":
        from tokenteller.model.kernels import compile_ahead

        compile_ahead(plan.config, plan.weights, plan.kv_dtype)
    from tokenteller.server.api.app import create_app, settle_process

    app = create_app(settings, plan)
    settle_process()
    return serve(app, settings, listeners)


def _announce_plan(settings: ServeSettings, plan: Plan) -> None:
    cpus = usable_cpus()
    threads = settings.threads or cpus.usable
    fields = {
        "weights": plan.weights,
        "weight_bytes": plan.kv.weight_bytes,
        "kv_dtype": plan.kv_dtype,
        "pool_bytes": plan.kv.pool_bytes,
        "full_sequences": plan.kv.table[-1].fit,
        "max_context": plan.kv.max_context,
        "threads": threads,
    }
    announce(settings, f"{plan_text(plan)}\n{threads_text(threads, cpus)}", "plan", fields)


def _check_certificate(settings: ServeSettings) -> None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile: needs --ssl-certfile, too")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"--ssl-certfile: {settings.ssl_certfile} cannot be used: {error}") from None


def announce(settings: ServeSettings, text: str, event: str, fields: dict[str, Any]) -> None:
    """Text for people on stdout, or a JSON log line. A stdout that takes nothing is no reason to stop."""
    if settings.log_format == "json":
        log.info(event, extra={"fields": fields})
        return
    try:
        print(text, flush=True)
    except OSError:
        silence_stdout()


def serve(app: FastAPI, settings: ServeSettings, listeners: list[Listener]) -> int:
    """Serves on the bound sockets until SIGTERM or SIGINT, then drains; a second signal ends it at once.

    Returns 0, or 1 if the engine failed. Raises ValueError if another process listens on the address by now.
    """
    from tokenteller.server.api.http_server import HttpServer

    def ready() -> None:
        address = address_text(*listeners[0].getsockname()[:2])
        url = f"{'https' if settings.ssl_certfile else 'http'}://{address}"
        announce(settings, f"\ntokenteller is ready on {url}", "ready", {"url": url, "model": settings.model})

    server = HttpServer(app, settings, ready)
    _raise_file_limit()
    listen(listeners, server.config.backlog)
    server.run([*listeners])
    code = server.drain.exit_code if server.drain else 1
    if server.started and app.state.service.engine.running:
        logging.shutdown()
        os._exit(code)  # the engine thread is stuck in native code, and would crash the interpreter's own exit
    return code


def _raise_file_limit() -> None:
    """Each connection is an open file, and the usual soft limit of 1,024 is less than what the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
