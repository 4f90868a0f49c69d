"""POST /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from tokenteller.model.sampler import Logprobs
from tokenteller.server.api.body import read
from tokenteller.server.api.openai.answer import Answer
from tokenteller.server.api.openai.models import check_model
from tokenteller.server.api.openai.parameters import OpenAIBody
from tokenteller.server.api.openapi import document
from tokenteller.server.api.respond import respond
from tokenteller.server.api.service import service_of
from tokenteller.server.errors import Unprocessable
from tokenteller.server.text.choice import Piece

router = APIRouter()

Prompt = str | Sequence[int]
MAX_PROMPTS = 64


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    default_max_tokens = 16  # OpenAI's

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="text, token ids, or up to 64 of either; each is answered by n choices"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 16, or what is left of the context"
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="of each token, and of this many of the likeliest")
    echo: bool = Field(False, description="begin the text with the prompt")

    @field_validator("prompt", mode="before")
    @classmethod
    def _texts_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or _is_ids(value):
            return value
        if not isinstance(value, list) or not value or not (all(map(_is_ids, value)) or all(map(_is_text, value))):
            raise ValueError("must be a string, an array of token ids, or an array of one of them")
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts at once, got {len(value)}")
        return value

    @property
    def prompts(self) -> list[Prompt]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


@router.post("/v1/completions", openapi_extra=document(CompletionBody, streams=True))
async def completions(request: Request) -> Response:
    """Continues a prompt, as OpenAI's API does."""
    service = service_of(request)
    body = await read(request, CompletionBody, service.settings.max_body)
    check_model(service, body.model)
    if body.echo and body.logprobs is not None:
        raise Unprocessable("echo with logprobs is not supported: prompts have no logprobs", param="echo")
    answer = CompletionAnswer(service, body, f"cmpl-{secrets.token_hex(12)}")
    prompts = body.prompts
    ids = [answer.id] if len(prompts) == 1 else [f"{answer.id}-{at}" for at in range(len(prompts))]
    await answer.open(
        [body.generation(id, prompt, body.max_tokens, body.logprobs) for id, prompt in zip(ids, prompts, strict=True)]
    )
    return await respond(request, answer, stream=body.stream)


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    body: CompletionBody

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"text": self._echo(index)} if self.body.echo else None

    def part(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def whole(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echo(index) + text}

    def logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        before = len(self._echo(index))
        entries = [(piece, piece.logprobs) for piece in pieces if piece.logprobs]
        return {
            "tokens": [self._name(piece.token_id) for piece, _ in entries],
            "token_logprobs": [entry.chosen for _, entry in entries],
            "top_logprobs": [self._top(piece, entry) for piece, entry in entries] if self.body.logprobs else None,
            "text_offset": [before + piece.offset for piece, _ in entries],
        }

    def _top(self, piece: Piece, entry: Logprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of two tokens with the same name the likelier is kept."""
        names: dict[str, float] = {}
        for id, value in (*entry.top, (piece.token_id, entry.chosen)):
            names.setdefault(self._name(id), value)
        return names

    def _name(self, id: int) -> str:
        """A token's text; its bytes, in OpenAI's notation, if they are not whole characters."""
        raw = self.service.streams.tokenizer.token_bytes(id, skip_special=False)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.n]
        return prompt if isinstance(prompt, str) else self.service.streams.tokenizer.decode(prompt)
