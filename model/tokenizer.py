"""Text to token ids and back: prompts, conversations, and incremental detokenisation."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers

from tokenteller.model.chat import ChatTemplateError, render
from tokenteller.model.template_text import BLANK, TemplateText, literal, written

ROLES = ("system", "developer", "user", "assistant", "tool")
_NONE: Mapping[str, Any] = {}


class Tokenizer:
    """A `tokenizers.Tokenizer`, and what serving needs besides."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        stop_ids: Iterable[int],
        chat_template: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: special tokens as chat templates call them, such as bos_token. Raises ValueError for a decoder that
        cannot turn tokens into text one by one."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.chat_template = chat_template
        self.names = dict(names or {})
        added = backend.get_added_tokens_decoder()
        self.special = {id: token.content for id, token in added.items() if token.special}
        self._special_ids = {content: id for id, content in self.special.items()}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._spelling = _spelling(backend)
        self.strips_space = self._spelling.strips_space
        # the bytes of each token seen so far; added words are spelled out even in a byte-level vocabulary
        self._bytes: dict[int, bytes] = {
            id: token.content.encode() for id, token in added.items() if self._spelling.byte_of and not token.special
        }

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of a prompt, after one BOS if the model has one. Special tokens that a client typed are text."""
        ids = _ids(self.backend, text)
        if not self.special.keys().isdisjoint(ids):
            ids = _ids(self._literal, text)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy that takes special tokens for text."""
        literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
        literal.encode_special_tokens = True
        return literal

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = _NONE) -> list[int]:
        """Ids of a conversation, up to where the assistant begins. Raises ChatTemplateError.

        BOS and all other special tokens come from the template; what a client wrote is text.
        """
        text = self.render_chat(messages, variables)
        encoding = self.backend.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        spans = [encoding.token_to_chars(at) for at, id in enumerate(ids) if id in self.special]
        if all(span and _by_template(text[span[0] : span[1]]) for span in spans):
            return ids
        ids, start = [], 0
        for match in self._special_text.finditer(written(text)):
            ids += [*_ids(self._literal, text[start : match.start()]), self._special_ids[match[0]]]
            start = match.end()
        return ids + _ids(self._literal, text[start:])

    def render_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = _NONE) -> TemplateText:
        """The prompt text of a conversation, up to where the assistant begins. Raises ChatTemplateError."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        names = {name: literal(text) for name, text in self.names.items()}
        conversation = {"messages": [_with_trusted_role(message) for message in messages]}
        return render(self.chat_template, defaults | dict(variables) | names | conversation)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all ids. Special tokens are left out, or written by name."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()

    def detokenizer(self, *, strip_space: bool = True) -> Detokenizer:
        return Detokenizer(self, strip_space=strip_space)

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        """What a token adds to the text: nothing for a special one (unless asked for) or an id without a token."""
        if id in self.special:
            return b"" if skip_special else self.special[id].encode()
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spelling.bytes_of(self.backend.id_to_token(id) or "")
        return known

    def token_text(self, id: int) -> str:
        """One token for display: special ones by name, incomplete characters as U+FFFD."""
        return self.token_bytes(id, skip_special=False).decode("utf-8", "replace")


def _by_template(token: TemplateText) -> bool:
    """Whether the template wrote all of a token; some swallow the spaces around them, which anyone may have written."""
    return BLANK not in written(token.strip() or token)


def _with_trusted_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some templates build special tokens from the role, '<|' + role + '|>', so known roles count as their text."""
    role = message.get("role")
    return {**message, "role": literal(role)} if role in ROLES else message


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids without BOS. Unlike `encode`, a batch of one releases the GIL: 1 MB blocked all streams for a second."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


class _Spelling(NamedTuple):
    """How the symbols of a vocabulary stand for bytes.

    `byte_of`: the byte of each stand-in character (byte-level BPE), else empty. `replaced`: what to replace in symbols.
    `strips_space`: whether the text loses one leading space.
    """

    byte_of: Mapping[str, int]
    replaced: Sequence[tuple[str, str]]
    strips_space: bool

    def bytes_of(self, symbol: str) -> bytes:
        if self.byte_of and all(char in self.byte_of for char in symbol):
            return bytes(self.byte_of[char] for char in symbol)
        if not self.byte_of and re.fullmatch("<0x[0-9A-Fa-f]{2}>", symbol):
            return bytes([int(symbol[3:5], 16)])
        for pattern, content in self.replaced:
            symbol = symbol.replace(pattern, content)
        return symbol.encode()


def _spelling(backend: tokenizers.Tokenizer) -> _Spelling:
    """Read from the tokenizer's decoder. Raises ValueError for a decoder of another kind."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"decoders": []}
    steps = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _Spelling({symbol: byte for byte, symbol in enumerate(byte_symbols())}, [], False)
    if "Metaspace" in kinds:
        step = steps[kinds.index("Metaspace")]
        return _Spelling({}, [(step["replacement"], " ")], step["prepend_scheme"] != "never")
    if not {"ByteFallback", "Replace"} & set(kinds):
        raise ValueError(f"decoder: {' + '.join(kinds) or 'none'} is neither byte-level nor byte-fallback")
    replaced = [(step["pattern"].get("String", ""), step["content"]) for step in steps if step["type"] == "Replace"]
    if not all(pattern for pattern, _ in replaced):
        raise ValueError("decoder: replacing by a regular expression is not supported")
    return _Spelling({}, replaced, any(step["type"] == "Strip" and step["start"] > 0 for step in steps))


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019): itself where printable."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


class Detokenizer:
    """Incremental text of one sequence, linear in its tokens. What was returned is always a prefix of the final text.

    At most three bytes, an incomplete character, are held back; bytes that cannot be UTF-8 become U+FFFD at once. The
    library's own DecodeStream replaces a whole run of byte tokens if its last byte is wrong, so nothing of the run
    could be sent before its end.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, strip_space: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space and tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        added = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        if added and self._strip:
            self._strip, added = False, added.removeprefix(b" ")
        return self._utf8.decode(added)

    def flush(self) -> str:
        """The rest at the end: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
