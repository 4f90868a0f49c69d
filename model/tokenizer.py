"""Text to ids and back: encoding, incremental detokenisation, chat template in Jinja's sandbox."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A conversation that the model's template refuses, or a template that cannot be run."""


class Tokenizer:
    """A tokenizers.Tokenizer with what serving needs beside it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        stop_ids: Iterable[int],
        chat_template: str | None = None,
    ) -> None:
        backend.encode_special_tokens = True  # the text "<|eos|>" typed by a user is text, not the end
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.stop_ids = frozenset(stop_ids)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special = {id: token.content for id, token in added.items() if token.special}
        self._byte_of, self._replaced, self.strips_space = _decoding(backend)
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with exactly one BOS in front if the model has one."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all ids; special tokens leave none, or their names."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

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

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant begins. Raises ChatTemplateError."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template")

        def raise_exception(message: str) -> None:
            raise ChatTemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self.chat_template, {"raise_exception": raise_exception})
            return template.render(messages=messages, add_generation_prompt=True, bos_token="")
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error


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

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        piece = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        if piece and self._strip:
            self._strip, piece = False, piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The tail that was held back: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
