"""Finds stop sequences in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts the text where the earliest stop sequence begins; holds back only what may still become part of one.

    One Knuth-Morris-Pratt automaton per stop sequence, so a character costs the same whatever came before it. Of
    overlapping matches the earliest start wins: a match is final once no sequence that began before it is still open.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # per stop sequence: how many of its characters the text ends with
        self._held = ""
        self._match: int | None = None  # where in the held text the earliest complete match begins

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to send, and whether a stop sequence was found; then the text ends before it."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        for end in range(len(self._held) + 1, len(text) + 1):
            open_since = self._advance(text[end - 1], end)
            if self._match is not None and self._match <= open_since:
                return self._finish(text)
        safe = len(text) - max(self._matched)
        if self._match is not None:
            self._match -= safe
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> tuple[str, bool]:
        """What was held back, at the end of the text. A complete match in it still counts."""
        return self._finish(self._held)

    def _advance(self, char: str, end: int) -> int:
        """Feeds one character. Returns where the earliest stop sequence that is still incomplete begins."""
        open_since = end
        for at, (stop, table) in enumerate(self._stops):
            matched = self._matched[at]
            while matched and stop[matched] != char:
                matched = table[matched]
            matched += stop[matched] == char
            if matched == len(stop):
                begin = end - matched
                self._match = begin if self._match is None else min(self._match, begin)
                matched = table[matched]
            self._matched[at] = matched
            open_since = min(open_since, end - matched)
        return open_since

    def _finish(self, text: str) -> tuple[str, bool]:
        match, self._match, self._held = self._match, None, ""
        return (text, False) if match is None else (text[:match], True)


def _failure_table(stop: str) -> list[int]:
    """table[n]: length of the longest proper suffix of stop[:n] that is also its prefix."""
    table = [0, 0]
    for n in range(1, len(stop)):
        length = table[n]
        while length and stop[length] != stop[n]:
            length = table[length]
        table.append(length + (stop[length] == stop[n]))
    return table
