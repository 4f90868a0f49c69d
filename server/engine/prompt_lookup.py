"""PromptLookup: draft tokens taken from the text itself. Torch-free.

Prompt lookup decoding (Saxena 2023): find an earlier place in prompt and output that ends as the text ends now, and
propose what came after it. The step that computes the next token computes the draft tokens with it, and samples each as
it would have anyway. So drafting changes when tokens come, never which.
"""

from __future__ import annotations

MIN_MATCH, MAX_MATCH = 2, 6  # tokens that must agree for a match, and beyond which a longer match is no better
CANDIDATES = 8  # how many earlier places are compared, latest first
DECAY = 0.9  # weight of the past acceptance rate at each new draft
MAX_PAUSE = 32  # most steps between two trials while drafting does not pay


class PromptLookup:
    """Drafts the next tokens of one sequence, as many as pay, and learns from how many are accepted."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # pair of tokens -> where it ended last
        self._before: list[int] = []  # for the pair ending at position 1, 2, ...: where it ended before; 0: nowhere
        self._accepted, self._tried = 1.0, 1.5  # optimistic, so that a first draft is tried
        self._wait, self._pause = 0, 1

    def draft(self, tokens: list[int], price: float, most: int) -> list[int]:
        """At most `most` tokens to follow `tokens`, each accepted with a chance above `price`; rarely one as a trial.

        tokens: must extend those of the call before.
        """
        if self._wait:
            self._wait -= 1
            return []
        chance = rate = self._accepted / self._tried
        count = 0
        while count < most and chance > price:
            count += 1
            chance *= rate
        draft = self._continuation(tokens, min(most, max(count, 1)))
        if draft and not count:
            self._wait = self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        return draft

    def learn(self, accepted: int, rejected: int) -> None:
        """Of the last draft, `accepted` tokens came, and then one was wrong (rejected = 1) or none (0)."""
        self._accepted = DECAY * self._accepted + accepted
        self._tried = DECAY * self._tried + accepted + rejected
        if accepted:
            self._wait, self._pause = 0, 1

    def _continuation(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens that followed the best match, repeated where there are fewer than that."""
        place = self._best_match(tokens)
        if not place or not count:
            return []
        after = tokens[place + 1 : place + 1 + count]
        return (after * (count // len(after) + 1))[:count]

    def _best_match(self, tokens: list[int]) -> int:
        """Where the longest match with the end of the text ends, the latest of several; 0: nowhere."""
        last, before = self._last, self._before
        for at in range(len(before) + 1, len(tokens)):
            pair = tokens[at - 1] << 32 | tokens[at]
            before.append(last.get(pair, 0))
            last[pair] = at
        best, longest, end = 0, MIN_MATCH - 1, len(tokens) - 1
        place = before[-1] if before else 0
        for _ in range(CANDIDATES):
            if not place or longest == MAX_MATCH:
                break
            same = MIN_MATCH
            while same < MAX_MATCH and same <= place and tokens[place - same] == tokens[end - same]:
                same += 1
            if same > longest:
                best, longest = place, same
            place = before[place - 1]
        return best
