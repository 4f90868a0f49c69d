"""Validation is total: any body gets a right answer or a 4xx in the error format."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import Live, parse_sse, serve
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tokenteller.server.api.body import Body, validate
from tokenteller.server.api.generate import GenerateBody
from tokenteller.server.api.openai.chat import ChatBody
from tokenteller.server.api.openai.completions import CompletionBody
from tokenteller.server.api.openai.shapes import Message, StreamOptions
from tokenteller.server.api.openai.tokenize import DetokenizeBody, TokenizeBody
from tokenteller.server.errors import ApiError

BODIES: dict[str, type[Body]] = {
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
PATHS = list(BODIES)
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "x", "max_tokens": 2, "stream": False},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}
FIELDS = [name for path in BASE for name in BODIES[path].model_fields]
FIELDS += ["best_of", "suffix", "tools", "user", "guided_json", "no_such_field", ""]


@pytest.fixture(scope="module")
def live(chatty: Path) -> Iterator[Live]:
    with serve(model=str(chatty), slots=8) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


edges: list[float] = [0, -1, 1, 2, -0.0, 0.5, 1e-300, 1e300, 1e999, float("nan"), 2**31, 2**53, 2**63, 2**64, 10**39]
edges += [10**400, -(2**63)]
keys = st.one_of(st.text(max_size=6), st.sampled_from(["type", "role", "content", "7"]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(edges),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None), max_size=12),  # lone surrogates too
    st.sampled_from(["", "x" * 300, "\u2028", "\x00", "nan", "10", "<|eos|>", "🙂"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        inner.map(lambda one: [{"role": "user", "content": one}]),
        inner.map(lambda one: {"type": "json_schema", "json_schema": {"schema": one}}),
        inner.map(lambda one: {"type": one, "properties": {"a": one}, "items": one, "pattern": one}),
    ),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3)


def check(client: httpx.Client, path: str, body: bytes) -> None:
    """A body gets an answer in the endpoint's format, or a 4xx in the error format."""
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            parse_sse(response.text)
        else:
            response.json()
        return
    assert 400 <= response.status_code < 500, (response.status_code, path, body, response.text)
    assert response.status_code != 422 or not path.startswith("/v1/")
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys() and error["message"]
    assert len(response.content) < 4_000, "what the client sent must not be echoed at length"
    assert "Traceback" not in response.text


def fuzz(live: Live, client: httpx.Client, count: int, seed: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(PATHS), changes)
    def any_value_in_any_field(path: str, change: dict[str, Any]) -> None:
        check(client, path, json.dumps(BASE[path] | change).encode())

    before = live.text("healthy", max_tokens=8, temperature=0)
    any_value_in_any_field()
    assert live.text("healthy", max_tokens=8, temperature=0) == before
    live.wait_idle()
    assert len(live.service.streams) == 0


FRAGMENTS = [b"\x00", b"\xff", b"{", b"[[", b"\\u", b"1e9", b"-", b",", b'"', b"\xed\xa0\x80"]


def fuzz_bytes(live: Live, client: httpx.Client, count: int, seed: int) -> None:
    rng = random.Random(seed)
    before = live.text("healthy", max_tokens=8, temperature=0)
    for _ in range(count):
        path = rng.choice(PATHS)
        body = bytearray(json.dumps(BASE[path] | {"stop": ["a", "é"], "seed": 1}, ensure_ascii=False).encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(4):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at : at + rng.randint(1, 9)]
                case 2:
                    body[at:at] = rng.choice(FRAGMENTS)
                case _:
                    body[at:at] = body[: rng.randrange(40)]
            body = body or bytearray(b"{")
        check(client, path, bytes(body))
    assert live.text("healthy", max_tokens=8, temperature=0) == before


def test_any_value_in_any_field_is_answered_or_refused(live: Live, client: httpx.Client) -> None:
    fuzz(live, client, 400, seed=1)


def test_any_bytes_are_answered_or_refused(live: Live, client: httpx.Client) -> None:
    fuzz_bytes(live, client, 300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_thousand_bodies_are_answered_or_refused(live: Live, client: httpx.Client) -> None:
    fuzz(live, client, 40_000, seed=2)
    fuzz_bytes(live, client, 10_000, seed=2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"null", 422),
        (b"5", 422),
        (b'"x"', 422),
        (b"[]", 422),
        (b"{}", 422),
        (b'{"prompt": "x"}garbage', 400),
        (b'\xef\xbb\xbf{"prompt": "x"}', 400),
        (b'{"prompt": "x", "a": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
        (b"[" * 100_000 + b"]" * 100_000, 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b'{"prompt": "x", "seed": 1' + b"0" * 400 + b"}", 400),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b".5}", 400),
        (b'{"prompt": "x", "temperature": Infinity}', 400),
        (b'{"prompt": "x", "temperature": -1e999}', 400),
        (b'{"prompt": "x", "logit_bias": {"7": NaN}}', 400),
        (b'{"prompt": "x", "logit_bias": {"7": 1, "7": 2}}', 400),
        (b'{"prompt": "x", "stop": ["\\udfff"]}', 400),
        (b'{"prompt": "x", "\\ud800": 1}', 400),
        (b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1}', 200),
        (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
        (b'{"prompt": "x", "max_tokens": 1.0}', 422),
        (b'{"prompt": "x", "max_tokens": 1e0}', 422),
        (b'{"prompt": "x", "stop": 5}', 422),
        (b"{" + b",".join(b'"k%d": 1' % number for number in range(60_000)) + b"}", 422),
        (b"{" + b",".join(b'"k%d": 1' % number for number in range(60_000)) + b', "k1": 1}', 400),
    ],
)
def test_a_body_is_strict_json_of_bounded_depth(client: httpx.Client, body: bytes, status: int) -> None:
    began = time.monotonic()
    response = client.post("/generate", content=body)
    assert response.status_code == status, response.text[:300]
    if status != 200:
        assert response.json()["error"]["message"]
    assert time.monotonic() - began < 20, "no body takes forever"


ODD: list[Any] = [True, 5, -1, 1.5, 10**39, "", "x" * 300, [], [1], ["x"] * 100, [{}], {"a": 1}, {"7": "x"}]
ODD += [{str(key): 1 for key in range(2000)}]


@pytest.mark.parametrize("path", PATHS)
def test_messages_use_the_words_of_json_not_of_python(path: str) -> None:
    model, base = BODIES[path], BASE[path]
    bodies = [base | {field: value} for field in model.model_fields for value in ODD]
    if "messages" in model.model_fields:
        message = {"role": "user", "content": "x"}
        bodies += [{"messages": [message | {key: value}]} for key in Message.model_fields for value in ODD]
    if "response_format" in model.model_fields:
        schema = {"name": "x", "schema": {}, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        bodies += [base | {"response_format": form | {key: value}} for key in form for value in ODD]
        forms = [form | {"json_schema": schema | {key: value}} for key in schema for value in ODD]
        bodies += [base | {"response_format": one} for one in forms]
        bodies += [base | {"stream_options": {key: value}} for key in StreamOptions.model_fields for value in ODD]
    told = []
    for body in bodies:
        try:
            validate(body, model)
        except ApiError as error:
            told.append(error.message)
    strange = re.compile(r"should|Input|instance|valid|None")
    assert len(told) > 10 and not [message for message in told if strange.search(message)]


@pytest.mark.parametrize("path", PATHS)
def test_null_means_absent_in_every_field(client: httpx.Client, path: str) -> None:
    nulls = dict.fromkeys(BODIES[path].model_fields)
    assert client.post(path, json=nulls | BASE[path]).is_success


def test_null_means_absent_at_every_level_but_inside_a_clients_schema(client: httpx.Client) -> None:
    schema = {"name": None, "description": None, "strict": None, "schema": {"const": None, "title": "x"}}
    body = BASE["/v1/chat/completions"] | {
        "messages": [{"role": "assistant", "content": None, "name": None}, {"role": "user", "content": "x"}],
        "stream_options": {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None},
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 9,
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.is_success and answer.json()["choices"][0]["message"]["content"] == "null"
    schema["schema"] = None
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema"
    assert "is required" in refused.json()["error"]["message"]
    assert client.post("/generate", json=BASE["/generate"] | {"no_such_field": None}).status_code == 422


def test_any_content_type_is_accepted_and_compression_is_refused(client: httpx.Client) -> None:
    body = b'{"prompt": "x", "max_tokens": 1, "stream": false}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""):
        assert client.post("/generate", content=body, headers={"Content-Type": kind}).status_code == 200
    refused = client.post("/generate", content=body, headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 415 and refused.json()["error"]["code"] == "unsupported_media_type"


def test_an_error_never_echoes_much_of_what_was_sent(client: httpx.Client) -> None:
    long = "A" * 200_000
    for body in (
        {"prompt": "x", long: 1},
        {"prompt": "x", "logit_bias": {long: 1}},
        {"prompt": "x", "regex": "(" + long},
    ):
        response = client.post("/generate", json=body)
        assert 400 <= response.status_code < 500 and len(response.content) < 1_000
    for path in ("/v1/models/" + "A" * 9_000, "/" + "A" * 9_000):
        response = client.get(path)
        assert response.status_code == 404 and len(response.content) < 1_000


# The OpenAPI document


@pytest.mark.parametrize(
    "examples", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["few", "many"]
)
def test_the_server_conforms_to_its_openapi_document(live: Live, examples: int) -> None:
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    run = 0
    for operation in schema.get_all_operations():
        case_strategy = operation.ok().as_strategy()

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case_strategy)
        def conforms(case: Any) -> None:
            case.call_and_validate(
                timeout=600, excluded_checks=[positive_data_acceptance]
            )  # a schema cannot express every rule

        conforms()
        run += 1
    assert run > 8
    with serve(model=live.service.settings.model, slots=1) as fresh:
        assert fresh.text("healthy", max_tokens=8, temperature=0) == live.text("healthy", max_tokens=8, temperature=0)
