"""Command-line arguments -> a settings object. Flags, groups and help come from the settings' own fields."""

from __future__ import annotations

import argparse
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from tokenteller.server.settings import GROUPS, PREFIX, REMOVED, ModelSettings

Settings = TypeVar("Settings", bound=ModelSettings)


def parse(command: str, kind: type[Settings], arguments: list[str], positional: str | None = None) -> Settings:
    """`positional`: the field that is given without a flag.

    Raises SettingsError for an unknown flag, ValidationError for a wrong value. Prints the help and exits for --help.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in REMOVED:
            raise SettingsError(f"{flag} {REMOVED[flag]}")
    given: dict[str, Any] = vars(_parser(command, kind, positional).parse_args(arguments))
    for name, value in given.items():
        if isinstance(value, list):  # a flag that was repeated
            given[name] = ",".join(value)
    return kind(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser(command: str, kind: type[ModelSettings], positional: str | None) -> _Parser:
    parser = _Parser(
        usage=f"tokenteller {command} [options]" + (f" {positional.upper()}" if positional else ""),
        description=kind.__doc__,
        epilog=f"Each flag is also a variable: --kv-memory is {PREFIX}KV_MEMORY. A flag overrides its variable.",
        argument_default=argparse.SUPPRESS,  # what is not given is left to the environment and the defaults
        allow_abbrev=False,
    )
    left = dict(kind.model_fields)
    if positional:
        parser.add_argument(positional, metavar=positional.upper(), help=left.pop(positional).description)
    groups = [(title, {name: left.pop(name) for name in names if name in left}) for title, names in GROUPS.items()]
    for title, fields in [(command, left), *groups]:  # first what only this command has
        if fields:
            group = parser.add_argument_group(title)
            for name, field in fields.items():
                _add(group, field.alias or name, field)
    return parser


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag, help_ = "--" + name.replace("_", "-"), _help(field)
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_)
    elif get_origin(field.annotation) is tuple:
        group.add_argument(flag, action="append", metavar=_metavar(name, field), help=help_)
    else:
        group.add_argument(flag, metavar=_metavar(name, field), help=help_)


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(get_args(field.annotation)) + "}"
    return name.rpartition("_")[2].upper()


def _help(field: FieldInfo) -> str:
    default: Any = field.default
    told = default is None or default is False or default == () or "(default" in (field.description or "")
    return f"{field.description}{'' if told else f' (default: {default})'}".replace("%", "%%")
