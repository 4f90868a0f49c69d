"""Constrained decoding: finished answers always match; grammars that do not compile are refused with the reason."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from checkpoints import EOS
from live import Live
from test_text import BYTES, SPM, spm

from tokenteller.model.grammar import GrammarError, Grammars, Kind
from tokenteller.model.tokenizer import Tokenizer

VOCAB = 264


def drawn(grammars: Grammars, tokenizer: Tokenizer, kind: Kind, text: str, seed: int, most: int = 400) -> str | None:
    """A text of allowed tokens, drawn uniformly; None if it does not end within `most` tokens."""
    matcher, rng, ids = grammars.compile(kind, text).start(), np.random.default_rng(seed), []
    detokenizer = tokenizer.detokenizer(strip_space=False)
    for _ in range(most):
        allowed = np.flatnonzero(matcher.allowed())
        stops = [id for id in allowed if id in tokenizer.stop_ids]
        id = int(stops[0] if stops and rng.random() < 0.3 else rng.choice(allowed))
        if id in tokenizer.stop_ids:
            return "".join(ids) + detokenizer.flush()
        ids.append(detokenizer.push(id))
        matcher.advance(id)
    return None


@pytest.mark.parametrize("tokenizer", [BYTES, SPM, spm()])
def test_every_finished_text_of_allowed_tokens_matches(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    ended = 0
    for seed in range(20):
        text = drawn(grammars, tokenizer, "regex", r"(ab|ć|🙂){1,3}\n?", seed)
        assert text is None or re.fullmatch(r"(ab|ć|🙂){1,3}\n?", text)
        number = drawn(grammars, tokenizer, "grammar", 'start: "x" start "y" | "z"', seed)
        assert number is None or (re.fullmatch("x*zy*", number) and number.count("x") == number.count("y"))
        ended += (text is not None) + (number is not None)
    assert ended > 30


def test_end_tokens_are_allowed_exactly_where_the_text_may_end() -> None:
    matcher = Grammars(BYTES, VOCAB).compile("regex", "ab?").start()
    assert not matcher.allowed()[EOS]
    matcher.advance(ord("a"))
    assert np.flatnonzero(matcher.allowed()).tolist() == [ord("b"), EOS]
    matcher.advance(ord("b"))
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]


def test_sequences_that_share_a_grammar_are_independent() -> None:
    grammar = Grammars(BYTES, VOCAB).compile("regex", "(ab)+")
    one, other = grammar.start(), grammar.start()
    one.advance(ord("a"))
    assert np.flatnonzero(one.allowed()).tolist() == [ord("b")]
    assert np.flatnonzero(other.allowed()).tolist() == [ord("a")]


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", '{"type": "bogus"}', "bogus"),
        ("json_schema", '{"$ref": "https://example.com/x"}', "retrieving"),
        ("json_schema", '{"$ref": "#/nope"}', "does not exist"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "string", "format": "nope"}', "nope"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "unclosed"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible"),
        ("regex", "(a|b", "unclosed"),
        ("regex", "(?=x)a", "look-around"),
        ("regex", r"[^\s\S]", "no text satisfies it"),
        ("grammar", "", "Empty"),
        ("grammar", "start: nope", "nope"),
        ("grammar", "start: start", "no text satisfies it"),
        ("regex", "x" * 65_537, "at most 65536"),
    ],
)
def test_an_invalid_or_unsatisfiable_grammar_is_refused_with_the_reason(kind: Kind, text: str, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        Grammars(BYTES, VOCAB).compile(kind, text)


def test_a_model_without_end_tokens_cannot_use_grammars() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        Grammars(Tokenizer(BYTES.backend, bos_id=None, stop_ids=[]), VOCAB).compile("regex", "a")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{100000}"),
        ("regex", "(a{1000}){1000}"),
        ("regex", "a" * 60_000),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
        ("grammar", 'start: "x"~1000000000'),
        ("grammar", "start: " + "a " * 20_000 + '\na: "x"'),
    ],
)
def test_a_grammar_with_expensive_masks_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(GrammarError, match=r"(?i)too many|too large"):
        matcher = Grammars(BYTES, VOCAB).compile(kind, text).start()
        for _ in range(3):
            matcher.advance(int(np.flatnonzero(matcher.allowed())[-1]))


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the schema allows `text` as a complete answer."""
    matcher = Grammars(BYTES, VOCAB).compile("json_schema", json.dumps(schema)).start()
    for byte in text.encode():
        if not matcher.allowed()[byte]:
            return False
        matcher.advance(byte)
    return bool(matcher.allowed()[EOS])


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (2, 2.5, "2 2.0 2.1 2.5 2.51"),
        (-2.5, -2, "-2 -2.0 -2.1 -2.5"),
        (0, 0.5, "0 0.0 0.1 0.5"),
        (-1, 1, "-1 1 0 -0.9"),
    ],
)
def test_exclusive_bounds_are_excluded(low: float, high: float, texts: str) -> None:
    for text in texts.split():
        for first, last in (("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMaximum")):
            schema = {"type": "number", first: low, last: high}
            inside = (low <= float(text) if first == "minimum" else low < float(text)) and float(text) < high
            assert accepts(schema, text) == inside, (schema, text)
    assert not accepts({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, "-0")
    assert accepts({"const": {"exclusiveMinimum": 2}}, '{"exclusiveMinimum": 2}')


def test_no_escape_lets_one_key_pass_for_another() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    assert accepts(schema, '{"a": 1}') and accepts(schema, '{"\\n": null}')
    assert not accepts(schema, '{"\\u0061": null}')
    assert accepts({"const": "a\x01é\n"}, '"a\\u0001é\\n"')


# Over the API


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """The kinds of schema that people send: objects, arrays, enums, bounded strings and numbers, unions."""
    nested = ["object", "map", "array", "tuple", "anyOf", "tree"] if depth else []
    kind = rng.choice([*nested, "string", "integer", "number", "range", "enum", "null", "const"])
    if kind == "object":
        names = [f"key{number}" for number in range(rng.randint(0, 3))]
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == "map":
        fields = {"^x[0-9]$": random_schema(rng, depth - 1)}
        return {"type": "object", "patternProperties": fields, "additionalProperties": random_schema(rng, depth - 1)}
    if kind == "tuple":
        first = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 1}
    if kind == "tree":
        node: dict[str, Any] = {"properties": {"v": random_schema(rng, depth - 1), "next": {"$ref": "#/$defs/leaf"}}}
        return node | {"type": "object", "required": ["v"]}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "string":
        pattern = rng.choice(["^[a-c]{2,4}$", r"^\d{4}-\d\d$", "^(yes|no)$"])
        return rng.choice([{"type": "string", "maxLength": 8}, {"type": "string", "pattern": pattern}])
    if kind == "range":
        low = rng.choice([-3, -0.5, 0, 2])
        return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice([0.5, 1, 7.25])}
    if kind == "const":
        return {"const": rng.choice([1.5, "x\u2028", "\x01", {"a": [1, None]}])}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": rng.randint(-20, 0), "maximum": rng.randint(1, 2000)}
    return {"type": "null"} if kind == "null" else {"enum": rng.sample(["red", "grün", 5, True, None, "🙂"], 3)}


def check_schemas(live: Live, count: int, seed: int) -> int:
    """How many answers to random schemas finished; each of those must be valid."""
    rng = random.Random(seed)
    finished = 0
    for number in range(count):
        schema = random_schema(rng) | {"$defs": {"leaf": {"type": ["integer", "null"]}}}
        answer = live.generate("x", json_schema=schema, max_tokens=200, seed=number, temperature=1.0)
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
            finished += 1
        else:
            assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 200
    return finished


def test_a_finished_answer_validates_against_its_schema(live: Live) -> None:
    assert check_schemas(live, 25, seed=1) > 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_random_schemas_are_followed(live: Live) -> None:
    assert check_schemas(live, 200, seed=2) > 120


def test_streamed_and_plain_answers_follow_the_grammar_in_every_choice(live: Live) -> None:
    body: dict[str, Any] = {"regex": "[a-f]{5}(!|\\?)", "n": 4, "seed": 3, "max_tokens": 20}
    answer, frames = live.generate("x", **body), live.stream("x", **body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-f]{5}[!?]", text) for text in texts) and len(set(texts)) > 1
    for index, text in enumerate(texts):
        assert "".join(f["text"] for f in frames if f["type"] == "token" and f["index"] == index) == text
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    cut = live.generate("x", regex="[a-f]{5}", max_tokens=3)["choices"][0]
    assert cut["finish_reason"] == "length" and re.fullmatch("[a-f]{3}", cut["text"])
    greedy = live.generate("x", regex="(yes|no)", temperature=0, logit_bias={str(ord("z")): 100})
    assert greedy["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    ("change", "status", "param", "word"),
    [
        ({"json_schema": {"type": "bogus"}}, 400, "json_schema", "bogus"),
        ({"json_schema": [1]}, 422, "json_schema", ""),
        ({"json_schema": "x"}, 422, "json_schema", ""),
        ({"regex": "("}, 400, "regex", "unclosed"),
        ({"grammar": "start: nope"}, 400, "grammar", "nope"),
        ({"grammar": "x" * 70_000}, 400, "grammar", "65536"),
        ({"grammar": "start: A", "regex": "a"}, 422, "grammar", "give only one"),
        ({"regex": "a", "stop": "b"}, 422, "stop", "cannot be combined"),
        ({"regex": "a", "stop_token_ids": [4]}, 422, "stop_token_ids", "cannot be combined"),
        ({"regex": "a", "ignore_eos": True}, 422, "ignore_eos", "cannot be combined"),
        ({"regex": "a", "min_tokens": 1}, 422, "min_tokens", "cannot be combined"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_refused_before_the_stream(
    live: Live, change: dict[str, Any], status: int, param: str, word: str, stream: bool
) -> None:
    response = live.post(prompt="x", stream=stream, **change)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == param and word in error["message"]


def test_a_grammar_at_a_dead_end_fails_only_its_own_request(live: Live) -> None:
    endless = {"grammar": 'start: "a" start', "max_tokens": 20}
    response = live.post(prompt="x", stream=False, **endless)
    assert response.status_code == 400 and response.json()["error"]["code"] == "bad_grammar"
    frames = live.stream("x", **endless)
    assert frames[-1]["type"] == "error" and frames[-1]["error"]["code"] == "bad_grammar"
    assert live.text("x", regex="abc") == "abc"
    live.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_response_format_is_followed(live: Live, stream: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body: dict[str, Any] = {"max_tokens": 40, "response_format": wanted, "seed": 1}
    if stream:
        chunks = live.stream("x", "/v1/completions", **body)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = live.post("/v1/completions", prompt="x", **body).json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert reason == "stop" and 0 <= json.loads(text)["n"] < 100
    anything = live.post(
        "/v1/completions", prompt="x", max_tokens=3, response_format={"type": "json_object"}, temperature=0
    )
    assert anything.json()["choices"][0]["text"].startswith("{")
    assert live.post("/v1/completions", prompt="x", max_tokens=3, response_format={"type": "text"}).is_success
    for wrong in (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        "json",
    ):
        refused = live.post("/v1/completions", prompt="x", response_format=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("response_format")
