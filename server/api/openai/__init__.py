"""The OpenAI protocol, and /tokenize and /detokenize in vLLM's form.

An endpoint is one module with a body (a subclass of parameters.OpenAIBody), an answer (a subclass of answer.Answer,
which says what chunks and the whole look like) and a route of three steps: read the body, open its streams, respond.
Add its router below.
"""

from __future__ import annotations

from fastapi import APIRouter

from tokenteller.server.api.openai import chat, completions, models, tokenize

router = APIRouter()
for module in (completions, chat, models, tokenize):
    router.include_router(module.router)
