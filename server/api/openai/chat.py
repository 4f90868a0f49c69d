"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from tokenteller.model.chat import ChatTemplateError
from tokenteller.server.api.body import read
from tokenteller.server.api.openai.answer import Answer
from tokenteller.server.api.openai.models import check_model
from tokenteller.server.api.openai.parameters import OpenAIBody
from tokenteller.server.api.openai.shapes import Message
from tokenteller.server.api.openapi import document
from tokenteller.server.api.respond import respond
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.errors import BadRequest, Unprocessable
from tokenteller.server.text.choice import Piece

router = APIRouter()


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    operation = "chat"
    default_max_tokens = 512

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 512, or what is left of the context"
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="this many of the likeliest; needs logprobs")
    chat_template_kwargs: dict[str, Any] = Field({}, description="further variables of the chat template")

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        super().screen(given)
        if given.get("top_logprobs") is not None and given.get("logprobs") is not True:
            raise Unprocessable("top_logprobs needs logprobs to be true", param="top_logprobs")
        lengths = [given[name] for name in ("max_tokens", "max_completion_tokens") if given.get(name) is not None]
        if len(lengths) == 2 and lengths[0] != lengths[1]:
            raise Unprocessable("max_tokens and max_completion_tokens differ; give one", param="max_tokens")


@router.post("/v1/chat/completions", openapi_extra=document(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation, as OpenAI's API does."""
    service = service_of(request)
    body = await read(request, ChatBody, service.settings.max_body)
    check_model(service, body.model)
    prompt = await conversation_ids(service, body.messages, body.chat_template_kwargs)
    answer = ChatAnswer(service, body, f"chatcmpl-{secrets.token_hex(12)}")
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    await answer.open([body.generation(answer.id, prompt, max_tokens, logprobs)])
    return await respond(request, answer, stream=body.stream)


async def conversation_ids(service: Service, messages: Sequence[Message], variables: dict[str, Any]) -> list[int]:
    """Token ids of a conversation, by the model's chat template. Raises BadRequest with the template's words."""
    plain = [message.for_template() for message in messages]
    try:
        return await asyncio.to_thread(service.streams.tokenizer.encode_chat, plain, variables)
    except ChatTemplateError as error:
        raise BadRequest(str(error), param="messages") from None


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def whole(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = [
            self._entry(piece.token_id, piece.logprobs.chosen)
            | {"top_logprobs": [self._entry(id, value) for id, value in piece.logprobs.top]}
            for piece in pieces
            if piece.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.service.streams.tokenizer
        return {"token": tokenizer.token_text(id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(id))}
