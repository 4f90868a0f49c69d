"""The OpenAI endpoints: /v1/completions, /v1/chat/completions, /v1/models; and /tokenize, /detokenize as vLLM has them.

Fields that OpenAI's API does not know are ignored and logged, because tools send them; those that it knows and this
server does not support are refused by name unless they ask for nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence, Set
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, field_validator, model_validator

from tokenteller.model.chat import ChatTemplateError
from tokenteller.model.grammar import Kind
from tokenteller.model.sampler import Logprobs
from tokenteller.server.api import sse
from tokenteller.server.api.body import Body, SamplingBody, document, read
from tokenteller.server.api.generate import unless_gone, usage
from tokenteller.server.api.service import Service, request_id, service_of
from tokenteller.server.api.stream import Delta, End, Item, Piece, Silence, Stream, Wanted
from tokenteller.server.engine.sequence import Started
from tokenteller.server.errors import ApiError, BadRequest, ModelNotFound, Unprocessable

router = APIRouter()
log = logging.getLogger("tokenteller.api")

Prompt = str | Sequence[int]

# Fields that cannot be honoured, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Where this server has another word for them.
_INSTEAD = {
    "add_generation_prompt": "chat_template_kwargs",
    "ebnf": "grammar",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "structured_outputs": "json_schema, regex or grammar",
}
# Fields of OpenAI's API that change nothing in the answer.
_INERT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
}


class StreamOptions(Body):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = Field(False, description="one more chunk at the end, with the usage and no choices")
    continuous_usage_stats: bool = Field(False, description="the usage so far in every chunk")


class Schema(Body):
    model_config = ConfigDict(extra="ignore")

    name: str = Field("", max_length=64)
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description="the schema is always followed")


class ResponseFormat(Body):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def structure(self) -> tuple[Kind, str] | None:
        """What the text must be. Raises Unprocessable."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "json_schema", '{"type": "object"}'
        if self.json_schema is None:
            raise Unprocessable("response_format.json_schema: is required", param="response_format.json_schema")
        return "json_schema", json.dumps(self.json_schema.definition, ensure_ascii=False)


class OpenAIBody(SamplingBody):
    """What both OpenAI endpoints take."""

    model_config = ConfigDict(extra="ignore")
    operation: ClassVar[str]
    default_max_tokens: ClassVar[int]

    model: str | None = Field(None, description="the served model's name; absent is the same")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="absent: fresh")
    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or JSON by a schema")
    stream: bool = False
    stream_options: StreamOptions = Field(StreamOptions.model_construct())

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        _screen(given, cls.model_fields.keys())

    def structure(self) -> tuple[Kind, str] | None:
        asked = super().structure()
        form = self.response_format.structure() if self.response_format else None
        if asked and form:
            raise Unprocessable(f"give one of response_format and {asked[0]}", param=asked[0])
        if form:
            self.refuse_beside_a_grammar("response_format")
        return asked or form

    def wanted(self, id: str, prompt: Prompt, max_tokens: int | None, logprobs: int | None) -> Wanted:
        return Wanted(
            id,
            prompt,
            max_tokens,
            self.sampling(logprobs),
            n=self.n,
            stops=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=self.structure(),
            terms=self.terms(),
            default_max_tokens=self.default_max_tokens,
            operation=self.operation,
        )


def _screen(given: dict[str, Any], known: Set[str]) -> None:
    """Refuses what is not supported and logs what is ignored. Raises Unprocessable."""
    for name, harmless in _UNSUPPORTED.items():
        value = given.get(name)
        if name not in known and value is not None and not any(_same(value, one) for one in harmless):
            remedy = f"use {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
            raise Unprocessable(f"{name} is not supported here; {remedy}", param=name)
    unknown = given.keys() - known - _INERT - _UNSUPPORTED.keys()
    if unknown:
        log.info("fields ignored: %s", ", ".join(repr(name[:60]) for name in sorted(unknown)[:10]))


def _same(value: Any, other: Any) -> bool:
    """Equality without 1 == True."""
    return type(value) is type(other) and bool(value == other)


class CompletionBody(OpenAIBody):
    """What a client may ask of /v1/completions."""

    operation = "text_completion"
    default_max_tokens = 16  # as OpenAI has it

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="text, token ids, or up to 64 of either; each is answered by n choices"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 16, or what is left of the context"
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="of each token, and of so many of the likeliest")
    echo: bool = Field(False, description="put the prompt before the text")

    @field_validator("prompt", mode="before")
    @classmethod
    def _texts_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or _ids(value):
            return value
        if isinstance(value, list) and value and (all(map(_ids, value)) or all(isinstance(one, str) for one in value)):
            if len(value) > 64:
                raise ValueError(f"at most 64 prompts at once, got {len(value)}")
            return value
        raise ValueError("must be a string, an array of token ids, or an array of one of them")

    @property
    def prompts(self) -> list[Prompt]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or _ids(prompt) else prompt


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class Message(Body):
    """One message of a conversation; its content is text."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str = Field(description="text, or an array of text parts, which are joined by line ends")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    tool_calls: Any = Field(None, description="not supported here")
    function_call: Any = Field(None, description="not supported here")
    audio: Any = Field(None, description="not supported here")

    @model_validator(mode="before")
    @classmethod
    def _an_assistant_may_say_nothing(cls, given: Any) -> Any:
        silent = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        return given | {"content": ""} if silent else given

    @field_validator("tool_calls", "function_call", "audio", mode="before")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported here; leave it out")
        return value

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise ValueError("tools are not supported here")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                told = f"{kind[:60]!r}" if isinstance(kind, str) else "something else"
                raise ValueError(f'only parts of the form {{"type": "text", "text": "..."}} are supported, not {told}')
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role  # templates know the older word
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name else {})


class ChatBody(OpenAIBody):
    """What a client may ask of /v1/chat/completions."""

    operation = "chat"
    default_max_tokens = 512

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="tokens to generate; absent: 512, or what is left of the context"
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="of so many of the likeliest; needs logprobs")
    chat_template_kwargs: dict[str, Any] = Field({}, description="more variables for the chat template")

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        super().screen(given)
        if given.get("top_logprobs") is not None and given.get("logprobs") is not True:
            raise Unprocessable("top_logprobs needs logprobs to be true", param="top_logprobs")
        lengths = [given[name] for name in ("max_tokens", "max_completion_tokens") if given.get(name) is not None]
        if len(lengths) == 2 and lengths[0] != lengths[1]:
            raise Unprocessable("max_tokens and max_completion_tokens differ; give one", param="max_tokens")


class Answer(ABC):
    """One answer made of one stream per prompt. Choice i of prompt p has the index p x n + i."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, service: Service, body: OpenAIBody, id: str) -> None:
        self.service = service
        self.body = body
        self.id = id
        self.created = int(time.time())
        self.streams: list[Stream] = []
        self.completion_tokens = 0
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self, wanted: Sequence[Wanted]) -> None:
        """Opens all streams or none. Raises ApiError."""
        try:
            for one in wanted:
                self.streams.append(await self.service.streams.open(one))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for stream in self.streams:
            stream.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """The chunks as SSE frames, those together that are ready together, ending with [DONE]."""
        lengths: dict[int, int] = defaultdict(int)
        try:
            async for prompt, items in self._items():
                ready = [frame for item in items for frame in self._frames(prompt, item, lengths)]
                if ready:
                    yield b"".join(ready)
            last = sse.frame(self._chunk([], True)) if self.body.stream_options.include_usage else b""
        except ApiError as error:
            last = sse.frame(error.body(v1=True))
        yield last + sse.DONE

    async def fold(self) -> dict[str, Any]:
        """The same as one JSON object. Raises ApiError for a failure."""
        text: dict[int, str] = defaultdict(str)
        pieces: dict[int, list[Piece]] = defaultdict(list)
        ends: dict[int, End] = {}
        async for prompt, items in self._items():
            for item in items:
                match item:
                    case Delta(index=index):
                        at = prompt * self.body.n + index
                        text[at] += item.text
                        pieces[at] += item.pieces
                    case End(index=index):
                        ends[prompt * self.body.n + index] = item
                        self.completion_tokens += item.completion_tokens
        choices = []
        for at, end in sorted(ends.items()):
            logprobs = self.logprobs(at, [piece for piece in pieces[at] if piece.offset < len(text[at])])
            choices.append({"index": at} | self.whole(at, text[at]) | {"logprobs": logprobs} | _finish(end))
        return self._envelope(self.kind) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Every generated token counts, the end token too; a prompt counts once, whatever n is."""
        each = [usage(stream, 0) for stream in self.streams]
        prompt_tokens = sum(one["prompt_tokens"] for one in each)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one["cached_tokens"] for one in each)},
        }

    async def _items(self) -> AsyncIterator[tuple[int, list[Item]]]:
        """What happens on all streams, with the place of its prompt."""
        if len(self.streams) == 1:
            async for items in self.streams[0].items():
                yield 0, items
            return
        queue: asyncio.Queue[tuple[int, list[Item] | ApiError | None]] = asyncio.Queue(1)  # slowed by a slow reader

        async def pump(prompt: int, stream: Stream) -> None:
            try:
                async for items in stream.items():
                    await queue.put((prompt, items))
                await queue.put((prompt, None))
            except ApiError as error:
                await queue.put((prompt, error))

        self._pumps = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(self.streams)]
        left = len(self._pumps)
        while left:
            at, items_or_end = await queue.get()
            if items_or_end is None:
                left -= 1
            elif isinstance(items_or_end, ApiError):
                raise items_or_end
            else:
                yield at, items_or_end

    def _frames(self, prompt: int, item: Item, lengths: dict[int, int]) -> list[bytes]:
        if isinstance(item, Silence):
            return [sse.comment(item.comment)]
        if isinstance(item, Delta):
            self.completion_tokens += len(item.pieces)
        usage_in_each = self.body.stream_options.continuous_usage_stats
        return [sse.frame(self._chunk([choice], usage_in_each)) for choice in self._chunks(prompt, item, lengths)]

    def _chunks(self, prompt: int, item: Item, lengths: dict[int, int]) -> list[dict[str, Any]]:
        """The choices of the chunks that one item makes; `lengths`: characters sent of each choice."""
        first = prompt * self.body.n
        match item:
            case Started():
                opened = [self.opening(at) for at in range(first, first + self.body.n)]
                return [{"index": first + i} | part | _open() for i, part in enumerate(opened) if part is not None]
            case Delta(index=index):
                at = first + index
                lengths[at] += len(item.text)
                pieces = [piece for piece in item.pieces if piece.offset < lengths[at]]
                if not item.text and not pieces:
                    return []
                return [{"index": at} | self.part(item.text) | _open() | {"logprobs": self.logprobs(at, pieces)}]
            case End(index=index):
                return [{"index": first + index} | self.part(None) | {"logprobs": None} | _finish(item)]
        return []

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_kind) | {"choices": choices}
        options = self.body.stream_options
        if options.include_usage or options.continuous_usage_stats:
            chunk["usage"] = self.usage() if with_usage else None
        return chunk

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model_name}

    @abstractmethod
    def opening(self, at: int) -> dict[str, Any] | None:
        """What the first chunk of a choice holds, if there is one before its text."""

    @abstractmethod
    def part(self, text: str | None) -> dict[str, Any]:
        """Text in a chunk; None in the last one."""

    @abstractmethod
    def whole(self, at: int, text: str) -> dict[str, Any]:
        """All text of a choice."""

    @abstractmethod
    def logprobs(self, at: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """The logprobs of tokens, in the endpoint's form; None when not asked for."""


def _open() -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": None}


def _finish(end: End) -> dict[str, Any]:
    """OpenAI's words have no deadline and no shutdown: cut short is `length`, and the reason stands beside it."""
    if end.reason in ("stop", "length"):
        return {"finish_reason": end.reason}
    return {"finish_reason": "length", "stop_reason": end.reason}


class Completion(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def opening(self, at: int) -> dict[str, Any] | None:
        return {"text": self._echo(at)} if self.body.echo else None

    def part(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def whole(self, at: int, text: str) -> dict[str, Any]:
        return {"text": self._echo(at) + text}

    def logprobs(self, at: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        before = len(self._echo(at))
        entries = [(piece, piece.logprobs) for piece in pieces if piece.logprobs]
        return {
            "tokens": [self._name(piece.token_id) for piece, _ in entries],
            "token_logprobs": [entry.chosen for _, entry in entries],
            "top_logprobs": [self._top(piece, entry) for piece, entry in entries] if self.body.logprobs else None,
            "text_offset": [before + piece.offset for piece, _ in entries],
        }

    def _top(self, piece: Piece, entry: Logprobs) -> dict[str, float]:
        """The likeliest and the one that came. Of two tokens with one name the likelier stays."""
        names: dict[str, float] = {}
        for id, value in (*entry.top, (piece.token_id, entry.chosen)):
            names.setdefault(self._name(id), value)
        return names

    def _name(self, id: int) -> str:
        """A token's text, or its bytes where they are no whole text, as OpenAI's API writes them."""
        raw = self.service.streams.tokenizer.token_bytes(id, skip_special=False)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _echo(self, at: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[at // self.body.n]
        return prompt if isinstance(prompt, str) else self.service.streams.tokenizer.decode(prompt)


class ChatCompletion(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def opening(self, at: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def whole(self, at: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, at: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
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


async def _answer(request: Request, answer: Answer, wanted: Sequence[Wanted]) -> Response:
    await answer.open(wanted)
    headers = {"X-Request-Id": request_id(request, answer.id)}
    if answer.body.stream:
        return sse.EventStreamResponse(answer.frames(), answer.close, headers)
    try:
        whole = await unless_gone(request, answer.fold())
    finally:
        answer.close()
    if whole is None:
        return Response(status_code=499)  # nobody is there to read it
    return Response(sse.json_line(whole), media_type="application/json", headers=headers)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model_name:
        told = f"the model {name[:100]!r} is not served here; {service.model_name!r} is"
        raise ModelNotFound(told, param="model")


@router.post("/v1/completions", openapi_extra=document(CompletionBody, streams=True))
async def completions(request: Request) -> Response:
    """Continues a prompt, as OpenAI's API does it."""
    service = service_of(request)
    body = await read(request, CompletionBody, service.settings.max_body)
    _check_model(service, body.model)
    if body.echo and body.logprobs is not None:
        raise Unprocessable("echo together with logprobs is not supported: prompts have no logprobs", param="echo")
    answer = Completion(service, body, f"cmpl-{secrets.token_hex(12)}")
    prompts = body.prompts
    many = len(prompts) > 1
    wanted = [
        body.wanted(f"{answer.id}-{at}" if many else answer.id, prompt, body.max_tokens, body.logprobs)
        for at, prompt in enumerate(prompts)
    ]
    return await _answer(request, answer, wanted)


@router.post("/v1/chat/completions", openapi_extra=document(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation, as OpenAI's API does it."""
    service = service_of(request)
    body = await read(request, ChatBody, service.settings.max_body)
    _check_model(service, body.model)
    prompt = await _conversation(service, body.messages, body.chat_template_kwargs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    answer = ChatCompletion(service, body, f"chatcmpl-{secrets.token_hex(12)}")
    max_tokens = body.max_completion_tokens or body.max_tokens
    wanted = body.wanted(answer.id, prompt, max_tokens, logprobs)
    return await _answer(request, answer, [wanted])


async def _conversation(service: Service, messages: Sequence[Message], variables: dict[str, Any]) -> list[int]:
    told = [message.for_template() for message in messages]
    try:
        return await asyncio.to_thread(service.streams.tokenizer.encode_chat, told, variables)
    except ChatTemplateError as error:
        raise BadRequest(str(error), param="messages") from None


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return _json({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The model, if it is the one that is served."""
    service = service_of(request)
    _check_model(service, name)
    return _json(_model(service))


def _model(service: Service) -> dict[str, Any]:
    name = service.model_name
    context = service.engine.scheduler.ledger.layout.max_context
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "tokenteller",
        "root": name,
        "max_model_len": context,
    }


class TokenizeBody(Body):
    """A text, or a conversation, to be turned into token ids."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = Field(None, description="text; or give messages")
    messages: list[Message] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] = Field({}, description="more variables for the chat template")
    add_special_tokens: bool = Field(True, description="whether BOS comes before a text, if the model has one")

    @classmethod
    def screen(cls, given: dict[str, Any]) -> None:
        _screen(given, cls.model_fields.keys())


class DetokenizeBody(Body):
    """Token ids to be turned into text."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize", openapi_extra=document(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model gets it."""
    service = service_of(request)
    body = await read(request, TokenizeBody, service.settings.max_body)
    _check_model(service, body.model)
    tokenizer = service.streams.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise Unprocessable("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await _conversation(service, body.messages, body.chat_template_kwargs)
    else:
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", add_bos=body.add_special_tokens)
    context = service.engine.scheduler.ledger.layout.max_context
    return _json({"tokens": ids, "count": len(ids), "max_model_len": context})


@router.post("/detokenize", openapi_extra=document(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens by their names."""
    service = service_of(request)
    body = await read(request, DetokenizeBody, service.settings.max_body)
    _check_model(service, body.model)
    service.streams.check_ids("tokens", body.tokens)
    text = await asyncio.to_thread(service.streams.tokenizer.decode, body.tokens, skip_special=False)
    return _json({"prompt": text})


def _json(value: Any) -> Response:
    return Response(sse.json_line(value), media_type="application/json")
