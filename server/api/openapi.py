"""What FastAPI cannot know of our routes for the OpenAPI document, because they read their bodies themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def document(model: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route with this body; with `streams` it can also answer with server-sent events."""
    schema = _inlined(model.model_json_schema())
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return extra | responds_with("text/event-stream") if streams else extra


def responds_with(media_type: str) -> dict[str, Any]:
    """`openapi_extra` of a route that can also answer with this media type."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    schema = event if media_type == "text/event-stream" else {"type": "string"}
    return {"responses": {"200": {"content": {media_type: {"schema": schema}}}}}


def _inlined(schema: dict[str, Any]) -> Any:
    """A JSON schema without $refs, which would not resolve inside the OpenAPI document."""
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(definitions[value["$ref"].removeprefix("#/$defs/")])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    return inline(schema)
