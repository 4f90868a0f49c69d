"""The command line: finds the command, runs it, and turns errors into one line and an exit code.

`tokenteller COMMAND` and `python -m tokenteller.server COMMAND` are the same. The commands are in `cli/`.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from pydantic import ValidationError
from pydantic_settings import SettingsError

from tokenteller.model.formats.errors import ConfigError
from tokenteller.server.cli import COMMANDS
from tokenteller.server.cli.terminal import open_standard_streams, silence_stdout
from tokenteller.server.settings import check_environment


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0 for success, 1 if it failed, 2 for wrong usage, 128 + n for signal n."""
    open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        return _usage(asked_for=arguments[:1] in (["-h"], ["--help"]))
    try:
        check_environment(os.environ)
        command = import_module(f"tokenteller.server.cli.{arguments[0]}")
        code: int = command.run(arguments[1:])
        sys.stdout.flush()
        return code
    except (ValidationError, SettingsError) as error:
        print(f"tokenteller: {_usage_error(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        silence_stdout()
        return 128 + signal.SIGPIPE
    except (ConfigError, ValueError, MemoryError, OSError) as error:
        print(f"tokenteller: {error}", file=sys.stderr)
        silence_stdout()
        return 1


def _usage(asked_for: bool) -> int:
    usage = f"usage: tokenteller {{{','.join(COMMANDS)}}} [options]"
    if not asked_for:
        print(f"{usage}   (tokenteller --help explains them)", file=sys.stderr)
        return 2
    commands = "".join(f"\n  {name:<10} {does}" for name, does in COMMANDS.items())
    print(f"{usage}\n{commands}\n\ntokenteller COMMAND --help lists the options of a command.")
    return 0


def _usage_error(error: ValidationError | SettingsError) -> str:
    """What is wrong with the flags or the environment, in one line. Never shows an API key."""
    if isinstance(error, SettingsError):
        return str(error).splitlines()[0].removeprefix("error parsing CLI: ")
    fault = error.errors(include_url=False)[0]
    name = "--" + str(fault["loc"][0]).rstrip("_").replace("_", "-")
    got = "" if name == "--api-key" else f" (got {fault['input']!r})"
    return f"{name}: {fault['msg'].removeprefix('Value error, ')}{got}"


if __name__ == "__main__":
    sys.exit(main())
