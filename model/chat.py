"""Chat templates: a conversation -> the prompt text, in Jinja's sandbox, with bounded work and output.

A template comes with a model file and is as little to be trusted as any download. Variables and filters are those that
Hugging Face's `apply_chat_template` gives, so that templates written for it run here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # lines of Python run by one rendering; a conversation takes some hundreds
MAX_CHARACTERS = 4_000_000


class ChatTemplateError(ValueError):
    """A conversation that the model's template refuses, or a template that cannot be run."""


class UnsafeTemplate(ChatTemplateError):
    """A template that is no Jinja, reaches for what it may not have, or does not come to an end."""


def check(template: str) -> None:
    """Tries a template on one short message. Raises UnsafeTemplate; that it refuses the message is no fault."""
    message = {"role": "user", "content": "hello"}
    try:
        render(template, {"messages": [message], "add_generation_prompt": True, "bos_token": "", "eos_token": ""})
    except UnsafeTemplate:
        raise
    except ChatTemplateError:
        pass


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that the template makes of the variables. Raises ChatTemplateError."""
    pieces: list[str] = []
    length = 0
    try:
        compiled = _compiled(template)
        with _Steps():
            for piece in compiled.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise UnsafeTemplate(f"the chat template makes more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
    except ChatTemplateError:
        raise
    except (SecurityError, TemplateSyntaxError, OverflowError) as error:  # OverflowError: too long a range
        raise UnsafeTemplate(f"the chat template failed: {' '.join(str(error).split())}") from error
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ChatTemplateError(f"the chat template failed: {error}") from error
    except MemoryError:
        raise UnsafeTemplate("the chat template ran out of memory") from None
    return "".join(pieces)


class _Steps:
    """Counts the lines that this thread runs inside the block, and ends the rendering when they are too many."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise UnsafeTemplate(f"the chat template takes more than {MAX_STEPS} steps")
        return self._trace


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on what one operator or call can make."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _refuse(r"%[^a-zA-Z%]*([0-9]{5}|\*)", left)
        elif _size(operator, left, right) > MAX_CHARACTERS:
            raise SecurityError(f"the result of {operator} is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > MAX_CHARACTERS for value in (*args, *kwargs.values())):
            raise SecurityError(f"an argument beyond {MAX_CHARACTERS} is too big")
        return super().call(context, called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        form = getattr(value, "__self__", None)
        if isinstance(form, str) and value.__name__ in ("format", "format_map"):
            _refuse(r":[^}]*([0-9]{5}|\{)", form)
        return super().wrap_str_format(value)


def _refuse(widths: str, form: str) -> None:
    if re.search(widths, form):
        raise SecurityError("a format as wide as that is not supported")


def _size(operator: str, left: Any, right: Any) -> int:
    """How long a text or list, or how many bits a number, the operator would make at most."""
    left_size, right_size = (
        len(side) if isinstance(side, str | list | tuple) else side.bit_length() if isinstance(side, int) else 0
        for side in (left, right)
    )
    if operator == "*" and isinstance(left, int) != isinstance(right, int):  # a text or list, so many times
        return right_size * left if isinstance(left, int) else left_size * right if isinstance(right, int) else 0
    if operator == "**":
        return left_size * right if isinstance(right, int) and isinstance(left, int) else 0
    return left_size + right_size


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.filters["center"] = lambda text, width=80: str(text).center(min(width, MAX_CHARACTERS))
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ChatTemplateError(message)
