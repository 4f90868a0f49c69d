"""Parameters that the OpenAI endpoints share, and what becomes of those that this server does not support.

A field that is not part of the protocol is ignored and logged, because tools send them. A field that is part of it and
changes the answer is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ConfigDict, Field

from tokenteller.model.grammar import Kind
from tokenteller.server.api.body import Body
from tokenteller.server.api.openai.shapes import ResponseFormat, StreamOptions
from tokenteller.server.api.parameters import GenerationBody
from tokenteller.server.errors import Unprocessable

log = logging.getLogger("tokenteller.api")

# Unsupported fields, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (0,),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# Our names for what some of them do.
INSTEAD = {
    "add_generation_prompt": "chat_template_kwargs",
    "ebnf": "grammar",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "structured_outputs": "json_schema, regex or grammar",
}


def _no_effect() -> Any:
    return Field(None, description="has no effect")


class ProtocolBody(Body):
    """What every body of the protocol may have: the model's name, and fields that do not change the answer."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(None, description="the served model's name, or absent")
    metadata: dict[str, str] | None = _no_effect()
    parallel_tool_calls: bool | None = _no_effect()
    prompt_cache_key: str | None = _no_effect()
    prompt_cache_options: dict[str, Any] | None = _no_effect()
    prompt_cache_retention: str | None = _no_effect()
    safety_identifier: str | None = _no_effect()
    service_tier: str | None = _no_effect()
    store: bool | None = _no_effect()
    user: str | None = _no_effect()
    verbosity: str | None = _no_effect()

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        """Refuses fields that are not supported and logs those that are ignored. Raises Unprocessable."""
        known = cls.model_fields.keys()
        for name, harmless in UNSUPPORTED.items():
            value = given.get(name)
            if name not in known and value is not None and not any(_same(value, one) for one in harmless):
                remedy = f"use {INSTEAD[name]}" if name in INSTEAD else "leave it out"
                raise Unprocessable(f"{name} is not supported; {remedy}", param=name)
        unknown = given.keys() - known - UNSUPPORTED.keys()
        if unknown:
            log.info("ignored unknown fields: %s", ", ".join(repr(name[:60]) for name in sorted(unknown)[:10]))


def _same(value: Any, other: Any) -> bool:
    """Equality without 1 == True."""
    return type(value) is type(other) and bool(value == other)


class OpenAIBody(GenerationBody, ProtocolBody):
    """What the endpoints that generate text share."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="absent: random")
    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or JSON by a schema")
    stream: bool = False
    stream_options: StreamOptions = Field(StreamOptions.model_construct())

    def grammar_source(self) -> tuple[Kind, str] | None:
        own = super().grammar_source()
        by_format = self.response_format.grammar_source() if self.response_format else None
        if own and by_format:
            raise Unprocessable(f"give only one of response_format and {own[0]}", param=own[0])
        if by_format:
            self.check_combines_with_grammar("response_format")
        return own or by_format
