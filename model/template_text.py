"""Text that remembers which of its characters a chat template wrote, so that a client cannot write special tokens.

A template's own literals are TemplateText; the client's text is ordinary `str`. Joining, slicing and stripping keep
track of both. Whatever else a template does (replace, lower, tojson, format ...) returns an ordinary `str`, which
counts as the client's: text can lose the right to be a special token that way, and never gain it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

BLANK = "\0"  # stands for a character that the template did not write; no special token contains it


class TemplateText(str):
    """`written`: the same text with BLANK for each character that the template did not write; all blank by default."""

    __slots__ = ("_written",)
    _written: str

    def __new__(cls, text: str = "", written: str | None = None) -> TemplateText:
        self = super().__new__(cls, text)
        self._written = BLANK * len(self) if written is None else written
        return self

    def __str__(self) -> str:
        return self  # str() of an output expression must not drop what is known about it

    def __getitem__(self, at: SupportsIndex | slice) -> TemplateText:
        return TemplateText(super().__getitem__(at), self._written[at])

    def lstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    def join(self, parts: Iterable[str], /) -> TemplateText:
        parts = list(parts)
        return TemplateText(super().join(parts), self._written.join(map(written, parts)))


def literal(text: str) -> TemplateText:
    """Text that the template wrote in full."""
    return TemplateText(text, text)


def written(text: str) -> str:
    """The text with BLANK for each character that no template wrote."""
    return text._written if isinstance(text, TemplateText) else BLANK * len(text)


class LiteralMarker(CodeGenerator):
    """Compiles the string literals of a template, inside and outside of expressions, to calls of environment.literal.

    What an autoescape block makes stays an ordinary `str`.
    """

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.literal({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.literal({''.join(group)!r})"
