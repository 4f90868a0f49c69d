"""The command line: tokenteller serve | plan | generate. `python -m server` is the same."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, SettingsConfigDict, SettingsError

from model.config import ConfigError
from server.planning import make_plan, plan_text
from server.settings import PlanSettings, ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

S = TypeVar("S", bound=BaseSettings)


class GenerateSettings(BaseSettings):
    """Stream an answer to the terminal from a running server."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENTELLER_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_prog_name="tokenteller generate",
    )

    prompt: CliPositionalArg[str] = Field(description="the text to continue")
    url: str = Field("http://127.0.0.1:8000", description="the server's address")
    max_tokens: int | None = Field(None, description="tokens to generate")
    temperature: float = Field(1.0, description="0 is greedy")
    seed: int | None = Field(None, description="same seed, same text")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 well, 1 could not do it, 2 wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {"serve": _serve, "plan": _plan, "generate": _generate}
    if not arguments or arguments[0] not in commands:
        print(
            "usage: tokenteller {serve,plan,generate} [options]   (--help after a command lists them)", file=sys.stderr
        )
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        return commands[arguments[0]](arguments[1:])
    except _Usage as error:
        print(f"tokenteller: {error}", file=sys.stderr)
        return 2
    except (ConfigError, ValueError, MemoryError) as error:
        print(f"tokenteller: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Usage(Exception):
    """Wrong flags or environment; one line."""


def _settings(model: type[S], arguments: list[str]) -> S:
    try:
        return CliApp.run(model, cli_args=arguments)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = "--" + "-".join(str(part) for part in fault["loc"]).rstrip("_").replace("_", "-")
        raise _Usage(f"{name}: {fault['msg'].removeprefix('Value error, ')} (got {fault['input']!r})") from None
    except SettingsError as error:
        raise _Usage(str(error).splitlines()[0]) from None


def _serve(arguments: list[str]) -> int:
    settings = _settings(ServeSettings, arguments)
    print(plan_text(make_plan(settings)[2]), flush=True)
    # waiting threads must not spin: the event loop needs the same cores; read when torch is first imported
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from server.api.app import create_app

    return run(create_app(settings), settings)


def run(app: FastAPI, settings: ServeSettings) -> int:
    """Serves until SIGTERM or SIGINT."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
            await super().startup(sockets)  # type: ignore[arg-type]
            for server in self.servers:
                host, port = server.sockets[0].getsockname()[:2]
                print(f"\ntokenteller is ready on http://{host}:{port}", flush=True)

    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_timeout,
    )
    server = Server(config)
    server.run()
    return 0 if server.started else 1


def _plan(arguments: list[str]) -> int:
    settings = _settings(PlanSettings, arguments)
    plan = make_plan(settings)[2]
    print(json.dumps(plan.to_json()) if settings.json_ else plan_text(plan))
    return 0


def _generate(arguments: list[str]) -> int:
    import httpx

    settings = _settings(GenerateSettings, arguments)
    body = settings.model_dump(exclude={"url"}, exclude_none=True)
    try:
        with httpx.stream("POST", f"{settings.url}/generate", json=body, timeout=None) as response:
            if response.status_code != 200:
                raise ValueError(json.loads(response.read())["error"]["message"])
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if event["type"] == "error":
                        raise ValueError(event["error"]["message"])
                    print(event.get("text", ""), end="", flush=True)
    except httpx.TransportError as error:
        raise ValueError(f"no server at {settings.url} ({error}); start one with `tokenteller serve`") from error
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
