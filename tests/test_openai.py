"""Completions and chat, used through the real `openai` client over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any, Literal

import httpx
import openai
import pytest
from checkpoints import EOS
from live import Live, serve
from pydantic import BaseModel, Field

from tokenteller.model.sampler import Draw, LogitsError, Sampled

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_a_completion_equals_generate(client: openai.OpenAI, chatty_live: Live) -> None:
    body = {"max_tokens": 30, "temperature": 1.3, "seed": 5}
    answer = client.completions.create(model="chatty", prompt="once", **body)
    native = chatty_live.generate("once", **body)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (native["choices"][0]["text"], native["choices"][0]["finish_reason"])
    assert answer.object == "text_completion" and answer.model == "chatty" and answer.id.startswith("cmpl-")
    assert answer.usage and answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == native["usage"]["completion_tokens"]
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens
    short = client.completions.create(model="chatty", prompt="x").usage
    assert short and short.completion_tokens <= 16


def test_a_streamed_completion_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "chatty",
        "prompt": ["a", "bc"],
        "max_tokens": 30,
        "seed": 5,
        "n": 2,
        "logprobs": 3,
    }
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    *rest, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in rest)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    text: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    tokens: dict[int, list[str]] = defaultdict(list)
    offsets: dict[int, list[int]] = defaultdict(list)
    for chunk in rest:
        (choice,) = chunk.choices
        assert not reasons[choice.index], "nothing comes after the end"
        text[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3] == sorted(text)
    for choice in whole.choices:
        assert text[choice.index] == choice.text
        assert reasons[choice.index] == [choice.finish_reason]
        assert choice.logprobs and tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
    assert len({choice.text for choice in whole.choices}) == 4


def test_several_prompts_are_answered_as_if_sent_alone(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "chatty", "max_tokens": 12, "temperature": 0}
    prompts = [f"prompt {number}" for number in range(10)]
    together = client.completions.create(prompt=prompts, **body)
    alone = [client.completions.create(prompt=prompt, **body) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    ids: list[list[int]] = [[7, 8], [9]]
    assert [choice.text for choice in client.completions.create(prompt=ids, **body).choices] == [
        client.completions.create(prompt=one, **body).choices[0].text for one in ids
    ]


def test_completion_logprobs_name_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chatty", prompt="x", max_tokens=40, seed=2, logprobs=4)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    raw = b""
    for name in logprobs.tokens:
        special = name.startswith("<|")
        raw += b"" if special else bytes.fromhex(name[8:]) if name.startswith("bytes:") else name.encode()
    assert raw.decode("utf-8", "replace") == choice.text
    assert all(value < 0 for value in logprobs.token_logprobs)
    for name, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[name] == value and 4 <= len(top) <= 5
    assert logprobs.text_offset == sorted(logprobs.text_offset) and logprobs.text_offset[0] == 0


def test_echo_begins_the_text_with_the_prompt_in_both_modes(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "chatty", "prompt": "once upon", "max_tokens": 5, "temperature": 0}
    plain = client.completions.create(**body).choices[0].text
    assert client.completions.create(**body, echo=True).choices[0].text == "once upon" + plain
    parts = [chunk.choices[0].text for chunk in client.completions.create(**body, echo=True, stream=True)]
    assert "".join(parts) == "once upon" + plain
    ids = client.completions.create(**body | {"prompt": list(b"once upon")}, echo=True)
    assert ids.choices[0].text == "once upon" + plain


def test_a_chat_answer_continues_the_rendered_conversation(client: openai.OpenAI, chatty_live: Live) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c<|im_end|>", "name": "bob"},
    ]
    answer = client.chat.completions.create(model="chatty", messages=messages, max_tokens=20, temperature=0)
    start, end = 258, 259
    ids = [start, *b"system\nbe brief", end, 10, start, *b"user\na\nb", end, 10, start, *b"assistant\n", end, 10]
    ids += [start, *b"user\nc<|im_end|>", end, 10, start, *b"assistant\n"]
    native = chatty_live.generate(ids, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == native["choices"][0]["text"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage and answer.usage.prompt_tokens == len(ids)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_a_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "chatty", "messages": HELLO, "max_completion_tokens": 30, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**body, logprobs=True, top_logprobs=2, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(part.delta.role is None for part in mine[1:])
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason and not mine[-1].delta.content
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content or []]
        assert choice.logprobs and entries == choice.logprobs.content


def test_the_bytes_of_chat_logprobs_join_to_the_content(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.create(
            model="chatty", messages=HELLO, max_tokens=60, seed=seed, logprobs=True, top_logprobs=3
        )
        (choice,) = answer.choices
        assert choice.logprobs and choice.logprobs.content and choice.message.content
        raw = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert raw.decode("utf-8", "replace") == choice.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_a_stop_sequence_is_in_neither_text_nor_logprobs(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "chatty", "prompt": "stop", "max_tokens": 60, "seed": 1, "logprobs": 0}
    text = client.completions.create(**body).choices[0].text
    marker = text[10:13]
    (choice,) = client.completions.create(**body, stop=marker).choices
    assert choice.text == text[: text.index(marker)] and choice.finish_reason == "stop"
    assert choice.logprobs and all(offset < len(choice.text) for offset in choice.logprobs.text_offset or [])
    streamed = list(client.completions.create(**body, stop=[marker], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_an_immediate_end_token_is_an_empty_answer(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "chatty", "messages": HELLO, "logit_bias": {str(EOS): 100}}
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == 1
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "stop"]
    assert chunks[-1].usage == answer.usage


def test_usage_is_streamed_on_request_only(client: openai.OpenAI, chatty_live: Live) -> None:
    body: dict[str, Any] = {"model": "chatty", "max_tokens": 6, "ignore_eos": True}
    plain = chatty_live.stream("x", "/v1/completions", **body)
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    each = chatty_live.stream("x", "/v1/completions", **body, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in each]
    assert counts == sorted(counts) and counts[-1] == 6
    assert chatty_live.post("/v1/completions", prompt="x", **body, stream_options={"include_usage": True}).is_success


def test_the_async_client_streams_many_at_once(chatty_live: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="chatty",
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=20,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=chatty_live.url + "/v1", api_key="none", max_retries=0) as client:
            alone = [await ask(client, number) for number in range(4)]
            together = await asyncio.gather(*(ask(client, number) for number in range(4)))
            assert together == alone
            return alone

    assert len(set(asyncio.run(all_of_them()))) == 4


def test_the_async_client_gets_what_the_sync_client_gets(client: openai.OpenAI, chatty_live: Live) -> None:
    text: dict[str, Any] = {"model": "chatty", "prompt": ["one", "two"], "max_tokens": 12, "seed": 3, "n": 2}
    text |= {"logprobs": 2, "stop": ["e"], "extra_body": {"cache_prefix": False}}
    chat: dict[str, Any] = {"model": "chatty", "messages": HELLO, "max_tokens": 12, "seed": 3, "n": 2}
    chat |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"cache_prefix": False}}
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    sync = [client.completions.create(**text), client.chat.completions.create(**chat)]
    sync += [list(client.completions.create(**text, **usage)), list(client.chat.completions.create(**chat, **usage))]

    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=chatty_live.url + "/v1", api_key="none", max_retries=0) as aclient:
            answers: list[Any] = [
                await aclient.completions.create(**text),
                await aclient.chat.completions.create(**chat),
            ]
            answers.append([chunk async for chunk in await aclient.completions.create(**text, **usage)])
            answers.append([chunk async for chunk in await aclient.chat.completions.create(**chat, **usage)])
            for wrong, kind in (({"temperature": -1}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)):
                with pytest.raises(kind):
                    await aclient.completions.create(**text | wrong, stream=True)
            return answers

    for one, other in zip(sync, asyncio.run(ask()), strict=True):
        assert content(one) == content(other)


def content(answer: Any) -> list[Any]:
    """Text and finish reasons by choice, and usage, of an answer or its chunks."""
    parts = answer if isinstance(answer, list) else [answer]
    usage = [part.usage.model_dump() for part in parts if part.usage]
    text: dict[int, str] = defaultdict(str)
    ends: dict[int, list[str]] = defaultdict(list)
    for choice in (choice for part in parts for choice in part.choices):
        said = getattr(choice, "text", None) if hasattr(choice, "text") else None
        message = getattr(choice, "message", None) or getattr(choice, "delta", None)
        text[choice.index] += said if message is None else message.content or ""
        ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert all(len(reasons) == 1 for reasons in ends.values())
    return [usage, text, ends]


def test_the_client_parses_structured_answers(client: openai.OpenAI) -> None:
    class Car(BaseModel):
        colour: Literal["red", "green"]
        doors: int = Field(ge=2, le=5)

    body: dict[str, Any] = {"model": "chatty", "messages": HELLO, "max_tokens": 60, "seed": 1}
    whole = client.chat.completions.parse(**body, response_format=Car).choices[0].message.parsed
    with client.chat.completions.stream(**body, response_format=Car) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole
    assert isinstance(whole, Car)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**body | {"max_tokens": 3}, response_format=Car)


def test_the_client_retries_after_a_429_and_is_served(chatty_live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model=chatty_live.service.settings.model, slots=1, queue_limit=1) as small:
        body = {"model": "chatty", "prompt": "x", "max_tokens": 40, "ignore_eos": True}
        runner, gate = small.service.engine.runner, threading.Event()
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda step: (gate.wait(0.1), run(step))[1])  # slow until it opens
        answers: list[int] = []
        threads = []
        for load in ((1, 0), (1, 1)):  # one runs, then one waits
            threads.append(
                threading.Thread(target=lambda: answers.append(small.post("/v1/completions", **body).status_code))
            )
            threads[-1].start()
            small.wait_for(load)
        with openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0) as impatient:
            with pytest.raises(openai.RateLimitError) as caught:
                impatient.post("/completions", cast_to=object, body=body)
            assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
            threading.Timer(0.2, gate.set).start()
            patient = impatient.with_options(max_retries=20)
            assert patient.post("/completions", cast_to=object, body=body)
        for thread in threads:
            thread.join()
        assert answers == [200, 200]


def test_the_client_raises_an_error_that_comes_mid_stream(
    client: openai.OpenAI, chatty_live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(logits: Any, draws: list[Draw]) -> list[Sampled | Exception]:
        error = LogitsError("logits at position 6 are not finite")
        return [Sampled(65) if draw.position < 6 else error for draw in draws]

    monkeypatch.setattr("tokenteller.server.engine.runner.sample", broken)
    text = ""
    with pytest.raises(openai.APIError, match="not finite") as caught:
        for chunk in client.completions.create(model="chatty", prompt="xyz", max_tokens=20, stream=True):
            text += chunk.choices[0].text
    assert text == "AAA" and caught.value.code == "engine_failure"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="chatty", prompt="xyz", max_tokens=20)
    chatty_live.wait_idle()


def test_closing_a_stream_of_several_prompts_frees_everything(chatty_live: Live) -> None:
    body = {"prompt": ["a", "b", "c"], "max_tokens": 200, "stream": True, "n": 2, "ignore_eos": True}
    with httpx.stream("POST", chatty_live.url + "/v1/completions", json=body) as response:
        next(response.iter_raw())
    chatty_live.wait_idle()
    assert len(chatty_live.service.streams) == 0
