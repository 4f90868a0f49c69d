"""Constrained decoding with llguidance: a JSON schema, regular expression or Lark grammar says which tokens may follow.

A worker thread computes each mask as soon as the previous token is known, while the decoder computes the logits.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tokenteller.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json_schema", "regex", "grammar"]
Mask = NDArray[np.bool_]

MAX_CHARACTERS = 65_536  # takes up to 0.3 s to compile


class GrammarError(ValueError):
    """A grammar that does not compile, that no text satisfies, or that becomes too expensive during generation."""


class Grammars:
    """Compiles grammars for one tokenizer and vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    def compile(self, kind: Kind, text: str) -> Grammar:
        """Takes 1 ms to 0.3 s, so call it on a thread. Raises GrammarError with the reason."""
        from llguidance import LLMatcher, LLParserLimits

        if len(text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are allowed")
        if not self._tokenizer.stop_ids:
            raise GrammarError("the model has no end token, so the text could never end")
        make: dict[Kind, Callable[[str], str]] = {
            "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(
                _with_exclusive_bounds(schema), overrides=_json_options(schema)
            ),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        # With the library's defaults, each mask of a{100000} takes 0.2 s, during which all streams wait, and refusing
        # (a{1000}){1000} takes 4 s. With these limits a mask takes at most 20 ms, and states 40 MB.
        limits = LLParserLimits(
            initial_lexer_fuel=100_000,
            step_lexer_fuel=20_000,
            step_max_items=10_000,
            max_lexer_states=20_000,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(self._library_tokenizer(), make[kind](text), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)[:300]) from None
        _raise_if_broken(matcher)
        return Grammar(matcher, self._workers, self._vocab_size)

    def _library_tokenizer(self) -> Any:
        """llguidance's view of the tokenizer, made on first use, from the bytes that the detokenizer uses too."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._vocabulary is None:
                vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
                stops = sorted(self._tokenizer.stop_ids)
                self._vocabulary = LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=stops)
            return self._vocabulary


def _json_options(schema: str) -> JsonCompileOptions:
    options: JsonCompileOptions = {
        # small models would use flexible whitespace to write blanks until max_tokens
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
    if not re.search(r"\\u00|\x7f", schema):  # unless it mentions a control character
        # one spelling per text: the key "\u0061" would count as different from "a"
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return options


def _with_exclusive_bounds(schema: str) -> str:
    """Works around the library including an exclusive bound that is a whole number less than 1 from the other bound
    (`exclusiveMinimum: 2, maximum: 2.5` would accept 2): such a bound moves inwards by a millionth."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        inner = {key: item if key in ("const", "enum") else moved(item) for key, item in value.items()}
        for name, opposite, step in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1e-6),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1e-6),
        ):
            bound, others = inner.get(name), [inner[other] for other in opposite if _is_number(inner.get(other))]
            if _is_number(bound) and bound == int(bound) and any(abs(other - bound) < 1 for other in others):
                inner[name] = bound + step
        return inner

    with suppress(ValueError, RecursionError):  # the library reports what is wrong
        if "exclusive" in schema:
            return json.dumps(moved(json.loads(schema)), ensure_ascii=False)
    return schema


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Vocabulary:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.stop_ids)
        self.tokens = [tokenizer.token_bytes(id) or b"<%d>" % id for id in range(vocab_size)]
        # tokens without text would let generation go on without progress
        self.special_token_ids = [id for id in range(vocab_size) if not tokenizer.token_bytes(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), add_bos=False)


class Grammar:
    """A compiled grammar, shared by any number of sequences."""

    def __init__(self, matcher: Any, workers: ThreadPoolExecutor, vocab_size: int) -> None:
        """Computes the first mask, which reveals a grammar that no text satisfies before a stream starts."""
        self._matcher = matcher
        self.workers = workers
        self.vocab_size = vocab_size
        self._first: Future[Mask] = Future()
        self._first.set_result(_mask(matcher.deep_copy(), vocab_size))

    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self, self._matcher.deep_copy(), self._first)


class Matcher:
    """One sequence's position in its grammar."""

    def __init__(self, grammar: Grammar, matcher: Any, mask: Future[Mask]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._mask = mask

    def allowed(self) -> Mask:
        """Mask of the tokens that may follow [vocab], end tokens where the text may end. Waits for the worker.

        Raises GrammarError if no token may follow or the grammar has become too expensive.
        """
        return self._mask.result()

    def advance(self, token_id: int) -> None:
        """Accepts a token and starts computing the next mask."""
        self._mask = self._grammar.workers.submit(self._step, token_id)

    def _step(self, token_id: int) -> Mask:
        self._matcher.consume_token(token_id)
        return _mask(self._matcher, self._grammar.vocab_size)


def _mask(matcher: Any, vocab_size: int) -> Mask:
    bits = np.zeros((vocab_size + 31) // 32, np.int32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    _raise_if_broken(matcher)
    mask = np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    if not mask.any():
        raise GrammarError("no token can continue this text")
    return mask


def _raise_if_broken(matcher: Any) -> None:
    if matcher.is_error():
        error = matcher.get_error()
        if "NoExtensionBias" in error:
            raise GrammarError("no text satisfies it")
        lines = [line for line in error.splitlines() if line.strip() and "verbose" not in line]
        raise GrammarError(" ".join(" ".join(lines).split())[:300])
