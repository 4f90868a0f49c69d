"""Fields of the OpenAI endpoints, models and tokenize, through the real `openai` client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from checkpoints import EOS
from live import CLIENT, Live

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "chatty" and model.object == "model"
    assert client.models.retrieve("chatty") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope/7b")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/plan", "/slots", "/metrics", "/v1/models", "/v1/models/chatty"]
)
def test_a_trailing_slash_changes_nothing(chatty_live: Live, path: str) -> None:
    plain = CLIENT.get(chatty_live.url + path)
    for slashes in ("/", "//"):
        answer = CLIENT.get(chatty_live.url + path + slashes, follow_redirects=False)
        assert answer.status_code == plain.status_code == 200
        assert path == "/metrics" or answer.json() == plain.json()
    assert CLIENT.head(chatty_live.url + path + "/").status_code == 200


def test_a_trailing_slash_does_not_lose_a_body(chatty_live: Live) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 5, "temperature": 0}
    plain = chatty_live.post("/v1/chat/completions", **body).json()["choices"]
    assert chatty_live.post("/v1/chat/completions/", **body).json()["choices"] == plain
    refused = chatty_live.post("/v1/completions/", prompt=5)
    assert refused.status_code == 400  # the status of /v1


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"regex": "(ab){3}"}, "ababab"),
        ({"regex": "x{4}", "response_format": {"type": "text"}}, "xxxx"),
        ({"grammar": 'start: "yes" "!"'}, "yes!"),
        ({"json_schema": {"const": [1]}}, "[1]"),
    ],
)
def test_grammars_work_as_on_generate(client: openai.OpenAI, asked: dict[str, Any], text: str) -> None:
    body: dict[str, Any] = {"model": "chatty", "max_tokens": 20, "extra_body": asked}
    assert client.completions.create(prompt="x", **body).choices[0].text == text
    chat = client.chat.completions.create(messages=HELLO, **body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 200}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["", "c"]}, "stop.0"),
        ({"stream_options": 5}, "stream_options"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"regex": "a", "grammar": "start: /a/"}, "grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": "a", "stop": "b"}, "stop"),
        ({"regex": "("}, "regex"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
    ],
)
def test_a_wrong_completion_field_is_a_400_that_names_it(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "chatty", "prompt": "x"}, extra_body=change)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert param.split(".")[0] in caught.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "a b"}]}, "messages.0.name"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [*HELLO, {"role": "system", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": "x"}, "metadata"),
        ({"service_tier": 1}, "service_tier"),
        ({"prompt_cache_key": ["x"]}, "prompt_cache_key"),
        ({"safety_identifier": 5}, "safety_identifier"),
        ({"verbosity": False}, "verbosity"),
        ({"user": {}}, "user"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_chat_field_is_a_400_that_names_it_before_any_stream(
    client: openai.OpenAI, change: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chatty", messages=HELLO, stream=stream, extra_body=change)
    assert caught.value.param == param


NO_EFFECT: dict[str, Any] = {
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "user": "me",
    "verbosity": "low",
}


def test_fields_without_effect_are_accepted_and_change_nothing(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {"model": "chatty", "messages": HELLO, "max_tokens": 9, "temperature": 0}
    plain = client.chat.completions.create(**chat).choices
    assert client.chat.completions.create(**chat, **NO_EFFECT).choices == plain
    assert client.chat.completions.create(**chat, extra_body=dict.fromkeys(NO_EFFECT)).choices == plain
    text: dict[str, Any] = {"model": "chatty", "prompt": "x", "max_tokens": 9, "temperature": 0}
    plain_text = client.completions.create(**text).choices
    assert client.completions.create(**text, extra_body=NO_EFFECT).choices == plain_text


def test_unknown_fields_and_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    harmless = {"best_of": 1, "suffix": "", "logprobs": None, "stop": None, "use_beam_search": False}
    assert client.completions.create(model="chatty", prompt="x", extra_body=harmless | {"made_up": {"a": 1}})
    harmless = {"tools": [], "tool_choice": "none", "stream_options": {"include_obfuscation": False}}
    assert client.chat.completions.create(model="chatty", messages=HELLO, max_tokens=2, extra_body=harmless)


def test_errors_are_raised_as_the_right_classes(client: openai.OpenAI, chatty_live: Live) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="m" * 10_000, prompt="x")
    assert missing.value.code == "model_not_found" and len(missing.value.message) < 500
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="chatty", prompt="x" * 300, max_tokens=10)
    assert long.value.code == "context_length_exceeded"
    assert long.value.body["max_context"] == 256 and long.value.body["prompt_tokens"] == 300  # type: ignore[index]
    raw = httpx.post(chatty_live.url + "/v1/completions", content=b'{"prompt": "\\ud800"}')
    assert raw.status_code == 400 and "surrogate" in raw.json()["error"]["message"]
    response = httpx.post(chatty_live.url + "/v1/completions", content=b"x" * (2**20 + 1))
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_tokenize_and_detokenize_are_inverse(chatty_live: Live) -> None:
    tokens = chatty_live.post("/tokenize", prompt="hé🙂<|eos|>").json()
    assert tokens == {"tokens": list("hé🙂<|eos|>".encode()), "count": 14, "max_model_len": 256}
    assert chatty_live.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "hé🙂<|eos|>"}
    assert chatty_live.post("/detokenize", tokens=[65, EOS, 263]).json() == {"prompt": "A<|eos|>"}
    chat = chatty_live.post("/tokenize", messages=HELLO).json()["tokens"]
    assert chat == [258, *b"user\nhello", 259, 10, 258, *b"assistant\n"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [264]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": "x"}),
    ):
        assert chatty_live.post(path, **body).status_code == 422
    assert chatty_live.post("/tokenize", prompt="x", model="nope").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO},
        {"messages": HELLO, "chat_template_kwargs": {"add_generation_prompt": False}},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, *HELLO], "tools": [], "user": "me"},
        {"messages": [{"role": "developer", "content": "<|eos|>", "name": None}, *HELLO]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [*HELLO, {"role": "system", "content": "refused by the template"}]},
        {"messages": [None]},
        {"messages": []},
        {"messages": HELLO, "tools": [{"type": "function"}]},
        {"messages": HELLO, "add_generation_prompt": False},
        {"messages": HELLO, "chat_template_kwargs": []},
    ],
)
def test_tokenize_counts_what_chat_counts_and_refuses_what_chat_refuses(
    chatty_live: Live, body: dict[str, Any]
) -> None:
    chat = chatty_live.post("/v1/chat/completions", **body, max_tokens=1)
    counted = chatty_live.post("/tokenize", **body)
    assert counted.is_success == chat.is_success
    if chat.is_success:
        assert counted.json()["count"] == chat.json()["usage"]["prompt_tokens"]
    else:
        assert counted.json() == chat.json()
