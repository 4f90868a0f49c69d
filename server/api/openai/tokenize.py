"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from tokenteller.server.api.body import Body, read
from tokenteller.server.api.openai.chat import conversation_ids
from tokenteller.server.api.openai.models import check_model
from tokenteller.server.api.openai.parameters import ProtocolBody
from tokenteller.server.api.openai.shapes import Message
from tokenteller.server.api.openapi import document
from tokenteller.server.api.respond import json_response
from tokenteller.server.api.service import service_of
from tokenteller.server.errors import Unprocessable

router = APIRouter()


class TokenizeBody(ProtocolBody):
    """A text or a conversation."""

    prompt: str | None = Field(None, description="text; or give messages")
    messages: list[Message] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] = Field({}, description="further variables of the chat template")
    add_special_tokens: bool = Field(True, description="whether a text begins with BOS, if the model has one")


class DetokenizeBody(Body):
    """Token ids."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize", openapi_extra=document(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model gets it."""
    service = service_of(request)
    body = await read(request, TokenizeBody, service.settings.max_body)
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Unprocessable("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await conversation_ids(service, body.messages, body.chat_template_kwargs)
    else:
        encode = service.streams.tokenizer.encode
        ids = await asyncio.to_thread(encode, body.prompt or "", add_bos=body.add_special_tokens)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.max_context})


@router.post("/detokenize", openapi_extra=document(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids; special tokens appear by name."""
    service = service_of(request)
    body = await read(request, DetokenizeBody, service.settings.max_body)
    check_model(service, body.model)
    service.streams.check_ids("tokens", body.tokens)
    text = await asyncio.to_thread(service.streams.tokenizer.decode, body.tokens, skip_special=False)
    return json_response({"prompt": text})
