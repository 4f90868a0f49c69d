"""Text to ids and back: encoding, incremental detokenisation, chat template in Jinja's sandbox."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from tokenteller.model.chat import ChatTemplateError, render
from tokenteller.model.template_text import BLANK, TemplateText, literal, written

ROLES = ("system", "developer", "user", "assistant", "tool")
_NONE: Mapping[str, Any] = {}


class Tokenizer:
    """A tokenizers.Tokenizer with what serving needs beside it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        stop_ids: Iterable[int],
        chat_template: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: what the chat template calls special tokens, such as bos_token. Raises ValueError for a tokenizer
        whose tokens cannot be turned to text one by one."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.chat_template = chat_template
        self.names = dict(names or {})
        added = backend.get_added_tokens_decoder()
        self.special = {id: token.content for id, token in added.items() if token.special}
        self._id_of = {content: id for id, content in self.special.items()}
        contents = sorted(self._id_of, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self._byte_of, self._replaced, self.strips_space = _decoding(backend)
        # words added beside the byte-level vocabulary stand there as they are, and not in stand-in characters
        plain = {id: token.content.encode() for id, token in added.items() if self._byte_of and not token.special}
        self._pieces: dict[int, bytes] = plain

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of a prompt, with exactly one BOS in front if the model has one. "<|eos|>" typed by a user is text."""
        ids = _ids(self.backend, text)
        if not self.special.keys().isdisjoint(ids):
            ids = _ids(self._literal, text)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer blind to special tokens; a copy is only made when a text has some."""
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
        spans = [
            text[start:stop] for id, (start, stop) in zip(ids, encoding.offsets, strict=True) if id in self.special
        ]
        # a span includes the spaces that its token swallows, whoever wrote them
        if not any(BLANK in written(span.strip() or span) for span in spans):
            return ids
        ids, start = [], 0
        for match in self._special_text.finditer(written(text)):
            ids += [*_ids(self._literal, text[start : match.start()]), self._id_of[match[0]]]
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
        """The text of all ids; special tokens leave none, or their names."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()

    def detokenizer(self, *, strip_space: bool = True) -> Detokenizer:
        return Detokenizer(self, strip_space=strip_space)

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        """What a token adds to the text: nothing if it is special (unless asked for) or if no token has this id."""
        if id in self.special:
            return b"" if skip_special else self.special[id].encode()
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._bytes_of(self.backend.id_to_token(id) or "")
        return piece

    def token_text(self, id: int) -> str:
        """A token alone, as one shows it: a special one by its name, bytes that are no character as U+FFFD."""
        return self.token_bytes(id, skip_special=False).decode("utf-8", "replace")

    def _bytes_of(self, symbol: str) -> bytes:
        if self._byte_of and all(char in self._byte_of for char in symbol):
            return bytes(self._byte_of[char] for char in symbol)
        if not self._byte_of and re.fullmatch("<0x[0-9A-Fa-f]{2}>", symbol):
            return bytes([int(symbol[3:5], 16)])
        for pattern, content in self._replaced:
            symbol = symbol.replace(pattern, content)
        return symbol.encode()


def _with_trusted_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some templates build special tokens from the role, '<|' + role + '|>', so known roles count as their text."""
    role = message.get("role")
    return {**message, "role": literal(role)} if role in ROLES else message


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens. A batch of one lets other threads run meanwhile, as `encode` does not: 1 MB
    stopped all streams for a second."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _decoding(backend: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]], bool]:
    """How symbols of the vocabulary become bytes, as the tokenizer's decoder says: the byte of each stand-in character
    (byte-level BPE), or else what is replaced in them; and whether the text loses one leading space.

    Raises ValueError for a decoder of another kind.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"decoders": []}
    steps = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return {symbol: byte for byte, symbol in enumerate(byte_symbols())}, [], False
    if "Metaspace" in kinds:
        step = steps[kinds.index("Metaspace")]
        return {}, [(step["replacement"], " ")], step["prepend_scheme"] != "never"
    if not {"ByteFallback", "Replace"} & set(kinds):
        raise ValueError(f"the decoder ({' + '.join(kinds) or 'none'}) is neither byte-level nor byte-fallback")
    replaced = [(step["pattern"].get("String", ""), step["content"]) for step in steps if step["type"] == "Replace"]
    if not all(pattern for pattern, _ in replaced):
        raise ValueError("the decoder replaces by a regular expression, which is not supported")
    return {}, replaced, any(step["type"] == "Strip" and step["start"] > 0 for step in steps)


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019): itself where printable."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


class Detokenizer:
    """Incremental text of one sequence, linear in its tokens: what was handed out is a prefix of the final text.

    The text is the UTF-8 of all token bytes; at most the three bytes of an unfinished character are held back. Bytes
    that are no UTF-8 become U+FFFD as soon as that is certain. (The library's decoder turns a whole run of byte tokens
    to U+FFFD when its last byte is wrong: then nothing of the run could ever be sent before its end.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, strip_space: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space and tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        piece = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        if piece and self._strip:
            self._strip, piece = False, piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The tail that was held back: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
