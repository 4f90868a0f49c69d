"""Chat templates: a conversation becomes the prompt text, in Jinja's sandbox, with bounded work and output.

A template arrives with a model file and deserves no more trust than any download. It gets the variables and filters of
Hugging Face's `apply_chat_template`, so templates written for that run here.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
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
from markupsafe import Markup

from tokenteller.model import template_text
from tokenteller.model.template_text import LiteralMarker, TemplateText

MAX_STEPS = 1_000_000  # lines of Python per rendering; a conversation takes a few hundred
MAX_CHARACTERS = 4_000_000


class ChatTemplateError(ValueError):
    """The template rejects this conversation, or fails on it."""


class UnsafeTemplate(ChatTemplateError):
    """The template is not valid Jinja, reaches out of the sandbox, or exceeds the bounds."""


def check(template: str) -> None:
    """Renders one short message, at start. Raises UnsafeTemplate; a template may reject this particular message."""
    message = {"role": "user", "content": "hello"}
    try:
        render(template, {"messages": [message], "add_generation_prompt": True, "bos_token": "", "eos_token": ""})
    except UnsafeTemplate:
        raise
    except ChatTemplateError:
        pass


def render(template: str, variables: Mapping[str, Any]) -> TemplateText:
    """The prompt text. Raises ChatTemplateError, with the line of the template."""
    try:
        compiled = _compiled(template)
        with _StepLimit():
            return _Environment.concat(compiled.generate(variables))
    except ChatTemplateError:
        raise
    except (SecurityError, TemplateSyntaxError, OverflowError, MemoryError) as error:  # OverflowError: a huge range
        raise UnsafeTemplate(_failure(error)) from error
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ChatTemplateError(_failure(error)) from error


def _failure(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else None
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"the chat template failed{f' in line {line}' if line else ''}: {reason}"


class _StepLimit:
    """Counts the lines of Python that this thread runs inside the block, and stops the rendering at MAX_STEPS."""

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
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        return None if frame.f_code.co_filename == template_text.__file__ else self._trace


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit on what a single operator or call can produce."""

    code_generator_class = LiteralMarker
    literal = staticmethod(template_text.literal)
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    @staticmethod
    def concat(parts: Iterable[str]) -> TemplateText:
        pieces: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > MAX_CHARACTERS:
                raise SecurityError(f"it produces more than {MAX_CHARACTERS} characters")
            pieces.append(part)
        return template_text.literal("").join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(r"%[^a-zA-Z%]*([0-9]{5}|\*)", left)
        elif _size(operator, left, right) > MAX_CHARACTERS:
            raise SecurityError(f"the result of {operator} is too long")
        texts = isinstance(left, str) and isinstance(right, str)
        if operator == "+" and texts and not isinstance(left, Markup) and not isinstance(right, Markup):
            return self.concat((left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > MAX_CHARACTERS for value in (*args, *kwargs.values())):
            raise SecurityError(f"an argument above {MAX_CHARACTERS} is too big")
        return super().call(context, called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        form = getattr(value, "__self__", None)
        if isinstance(form, str) and value.__name__ in ("format", "format_map"):
            _refuse_wide_format(r":[^}]*([0-9]{5}|\{)", form)
        return super().wrap_str_format(value)


def _refuse_wide_format(widths: str, form: str) -> None:
    if re.search(widths, form):
        raise SecurityError("a format this wide is not supported")


def _size(operator: str, left: Any, right: Any) -> int:
    """An upper bound of what the operator produces: characters of a text, items of a list, or bits of a number."""
    left_size, right_size = (
        len(side) if isinstance(side, str | list | tuple) else side.bit_length() if isinstance(side, int) else 0
        for side in (left, right)
    )
    if operator == "*" and isinstance(left, int) != isinstance(right, int):  # a text or list, repeated
        return right_size * left if isinstance(left, int) else left_size * right if isinstance(right, int) else 0
    if operator == "**":
        return left_size * right if isinstance(right, int) and isinstance(left, int) else 0
    return left_size + right_size


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training. Here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

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
