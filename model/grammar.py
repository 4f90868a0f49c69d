"""Grammars: a JSON schema, a regular expression or a Lark grammar -> which tokens may come next, by llguidance.

A mask is computed on a worker thread as soon as the token before it is known, so that the decoder's next step hides it.
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

MAX_CHARACTERS = 65_536  # compiling takes at most about 0.3 s for so many


class GrammarError(ValueError):
    """A grammar that cannot be compiled, that nothing satisfies, or that became too costly on the way."""


class Grammars:
    """Compiles grammars for one tokenizer and vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: Any = None
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    def compile(self, kind: Kind, text: str) -> Grammar:
        """Takes from 1 ms to some 0.3 s, so it belongs on a thread. Raises GrammarError with the reason."""
        from llguidance import LLMatcher, LLParserLimits

        if len(text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are taken")
        if not self._tokenizer.stop_ids:
            raise GrammarError("the model has no end token, so nothing could end the text")
        make: dict[Kind, Callable[[str], str]] = {
            "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(
                _without_whole_open_ends(schema), overrides=_json_options(schema)
            ),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        # By the library's own bounds a{100000} takes 0.2 s for each mask, for which all other streams would wait, and
        # (a{1000}){1000} 4 s to be refused. By these a mask takes 20 ms at most, with 40 MB of states.
        limits = LLParserLimits(
            initial_lexer_fuel=100_000,
            step_lexer_fuel=20_000,
            step_max_items=10_000,
            max_lexer_states=20_000,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(self._vocabulary(), make[kind](text), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)[:300]) from None
        _raise_if_broken(matcher)
        return Grammar(matcher, self._workers, self._vocab_size)

    def _vocabulary(self) -> Any:
        """llguidance's view of the tokenizer, made when it is first wanted: the same bytes that the text is made of."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._known is None:
                words = _Words(self._tokenizer, self._vocab_size)
                stops = sorted(self._tokenizer.stop_ids)
                self._known = LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=stops)
            return self._known


def _json_options(schema: str) -> JsonCompileOptions:
    options: JsonCompileOptions = {
        # free whitespace would let a small model write blanks until its tokens are spent
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    }
    if not re.search(r"\\u00|\x7f", schema):  # it names no control character
        # one spelling for each text: as a key, "\u0061" would pass for another one than "a"
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return options


def _without_whole_open_ends(schema: str) -> str:
    """For `exclusiveMinimum: 2, maximum: 2.5` the library takes 2 as well, and for -2.5 to -2 the open end -2: where
    the whole range lies within 1 of such an end, it is moved inwards by a millionth."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        inner = {key: item if key in ("const", "enum") else moved(item) for key, item in value.items()}
        for open_end, ends, step in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1e-6),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1e-6),
        ):
            end, others = inner.get(open_end), [inner[name] for name in ends if _is_number(inner.get(name))]
            if _is_number(end) and end == int(end) and any(abs(other - end) < 1 for other in others):
                inner[open_end] = end + step
        return inner

    with suppress(ValueError, RecursionError):  # the library will say what is wrong with it
        if "exclusive" in schema:
            return json.dumps(moved(json.loads(schema)), ensure_ascii=False)
    return schema


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Words:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.stop_ids)
        self.tokens = [tokenizer.token_bytes(id) or b"<%d>" % id for id in range(vocab_size)]
        # a token without text would be a step without progress
        self.special_token_ids = [id for id in range(vocab_size) if not tokenizer.token_bytes(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), add_bos=False)


class Grammar:
    """A compiled grammar; any number of sequences can follow it."""

    def __init__(self, matcher: Any, workers: ThreadPoolExecutor, vocab_size: int) -> None:
        """Computes the first mask, so that a grammar which nothing satisfies is found before anything starts."""
        self._matcher = matcher
        self.workers = workers
        self.vocab_size = vocab_size
        self._first: Future[Mask] = Future()
        self._first.set_result(_mask(matcher.deep_copy(), vocab_size))

    def start(self) -> Matcher:
        """The beginning of one sequence."""
        return Matcher(self, self._matcher.deep_copy(), self._first)


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, grammar: Grammar, matcher: Any, mask: Future[Mask]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._mask = mask

    def allowed(self) -> Mask:
        """Which tokens may come next [vocab]: end tokens where the text may end. Waits for the mask if need be.

        Raises GrammarError when nothing may come, or when the grammar has become too costly.
        """
        return self._mask.result()

    def advance(self, token_id: int) -> None:
        """Takes the token that came and has the next mask computed."""
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
        raise GrammarError("nothing can continue this text")
    return mask


def _raise_if_broken(matcher: Any) -> None:
    if matcher.is_error():
        error = matcher.get_error()
        if "NoExtensionBias" in error:
            raise GrammarError("no text satisfies it")
        lines = [line for line in error.splitlines() if line.strip() and "verbose" not in line]
        raise GrammarError(" ".join(" ".join(lines).split())[:300])
