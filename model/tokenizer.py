"""Text to ids and back: encoding, incremental detokenisation, chat template in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream


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

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with exactly one BOS in front if the model has one."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids; special tokens leave none."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

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


class Detokenizer:
    """Incremental text of one sequence, linear in its tokens: what was handed out is a prefix of the final text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = ""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer.backend, token_id) or ""
        self._sent += text
        return text

    def flush(self) -> str:
        """The tail that was held back; an unfinished character becomes U+FFFD, as in the text of all ids."""
        final = self._tokenizer.decode(self._ids)
        tail = final[len(self._sent) :] if final.startswith(self._sent) else ""
        self._sent += tail
        return tail
