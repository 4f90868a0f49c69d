"""Objects inside the bodies of the OpenAI protocol."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from tokenteller.model.grammar import Kind
from tokenteller.server.api.body import Body
from tokenteller.server.errors import Unprocessable


class StreamOptions(Body):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = Field(False, description="one more chunk at the end, with the usage and no choices")
    continuous_usage_stats: bool = Field(False, description="the usage so far in every chunk")


class Schema(Body):
    model_config = ConfigDict(extra="ignore")

    name: str = Field("", max_length=64)
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description="the schema is followed in any case")


class ResponseFormat(Body):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def grammar_source(self) -> tuple[Kind, str] | None:
        """What constrains the text. Raises Unprocessable."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "json_schema", '{"type": "object"}'
        if self.json_schema is None:
            raise Unprocessable("response_format.json_schema: is required", param="response_format.json_schema")
        return "json_schema", json.dumps(self.json_schema.definition, ensure_ascii=False)


class Message(Body):
    """One message of a conversation. Its content is text."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str = Field(description="text, or an array of text parts, which are joined by newlines")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    tool_calls: Any = Field(None, description="not supported")
    function_call: Any = Field(None, description="not supported")
    audio: Any = Field(None, description="not supported")

    @model_validator(mode="before")
    @classmethod
    def _assistant_content_may_be_null(cls, given: Any) -> Any:
        empty = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if empty else given

    @field_validator("tool_calls", "function_call", "audio", mode="before")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported; leave it out")
        return value

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise ValueError("tools are not supported")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _text_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                got = f"{kind[:60]!r}" if isinstance(kind, str) else "something else"
                raise ValueError(f'only parts of the form {{"type": "text", "text": "..."}} are supported, got {got}')
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role  # chat templates only know the older name
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name else {})
