"""One choice of an answer: token ids in, text that is ready to send out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tokenteller.model.sampler import Logprobs
from tokenteller.model.tokenizer import Detokenizer
from tokenteller.server.text.stop_sequences import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """A generated token. `offset`: where its text begins, in characters of the choice's whole text."""

    token_id: int
    offset: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice, with the tokens whose text begins in it. The last delta has all remaining tokens."""

    index: int
    text: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a choice that did not fail."""

    index: int
    reason: str
    completion_tokens: int


class ChoiceText:
    """Detokenises a choice and cuts it at stop sequences. Joined deltas are the same however often they are read."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        end_ids: AbstractSet[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.end: End | None = None
        self.completion_tokens = 0
        self.pending: deque[Piece] = deque()
        self._pending_text = ""
        self._decoded = 0  # characters of all tokens so far
        self._released = 0  # of these, characters that were sent or are ready
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)

    def add(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Takes the next token. Sets `end` if it completes a stop sequence."""
        self.completion_tokens += 1
        self.pending.append(Piece(token_id, self._decoded, logprobs))
        if token_id not in self._end_ids:  # end tokens are no part of the text
            self._append(self._detokenizer.push(token_id))

    def finish(self, reason: str) -> None:
        """No more tokens. A stop sequence that only now turns out to be complete overrides `reason`."""
        stopped = self.flush()
        if self.end is None:
            self.end = End(self.index, "stop" if stopped else reason, self.completion_tokens)

    def flush(self) -> bool:
        """Releases the text that was held back. Returns whether a stop sequence cut it."""
        self._append(self._detokenizer.flush())
        text, stopped = self._stops.flush()
        self._release(text)
        return stopped

    def ready(self) -> Delta | None:
        """What can be sent now. A token waits for its text, but not beyond the end."""
        if not self._pending_text and not (self.end and self.pending):
            return None
        pieces = []
        while self.pending and (self.end or self.pending[0].offset < self._released):
            pieces.append(self.pending.popleft())
        text, self._pending_text = self._pending_text, ""
        return Delta(self.index, text, tuple(pieces))

    def _append(self, piece: str) -> None:
        self._decoded += len(piece)
        if self.completion_tokens <= self._min_tokens:  # too early to stop
            self._release(piece)
            return
        text, stopped = self._stops.push(piece)
        self._release(text)
        if stopped:
            self.end = End(self.index, "stop", self.completion_tokens)

    def _release(self, text: str) -> None:
        self._pending_text += text
        self._released += len(text)
