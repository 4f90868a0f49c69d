"""Guesser: how a text will go on, by how it went on before. Torch-free.

Prompt lookup (Saxena 2023): the last tokens are looked up in the prompt and the text so far; what came after them there
is guessed to come again. Guesses are computed in the same step as the token before them, and that step itself tells
which of them are right: those that it draws anyway. So they change when tokens come, never which.
"""

from __future__ import annotations

SHORTEST, LONGEST = 2, 6  # tokens that must agree for a place to count, and from where on more are no better
PLACES = 8  # of those where the last two tokens came before, how many are compared, the latest first
FORGET = 0.9  # weight of what was learned so far at each new guess
REST = 32  # most steps without a guess before the next try, when guesses do not pay


class Guesser:
    """Guesses the next tokens of one sequence, as many as pay, and learns from how often it is right."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # a pair of tokens -> the position of the second, where they came last
        self._before: list[int] = []  # of the pair that ends at position 1, 2, ...: where it came before; 0: nowhere
        self._right, self._tried = 1.0, 1.5  # a first try is worth it
        self._rest, self._pause = 0, 1

    def guess(self, tokens: list[int], price: float, most: int) -> list[int]:
        """At most `most` tokens after `tokens`, each with a chance above `price`; now and then one, to see how it goes.

        tokens: those of the call before, and more.
        """
        if self._rest:
            self._rest -= 1
            return []
        chance = rate = self._right / self._tried
        count = 0
        while count < most and chance > price:
            count += 1
            chance *= rate
        guesses = self._look_up(tokens, min(most, max(count, 1)))
        if guesses and not count:
            self._rest = self._pause
            self._pause = min(2 * self._pause, REST)
        return guesses

    def learn(self, right: int, wrong: int) -> None:
        """So many guesses were right, and then one wrong, or none."""
        self._right = FORGET * self._right + right
        self._tried = FORGET * self._tried + right + wrong
        if right:
            self._rest, self._pause = 0, 1

    def _look_up(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens that came after the place most like the end; less than that lies behind it repeats itself."""
        place = self._place(tokens)
        if not place or not count:
            return []
        after = tokens[place + 1 : place + 1 + count]
        return (after * (count // len(after) + 1))[:count]

    def _place(self, tokens: list[int]) -> int:
        """The position of the last of the most tokens, at least two, that the end has in common with; 0: nowhere."""
        last, before = self._last, self._before
        for at in range(len(before) + 1, len(tokens)):
            pair = tokens[at - 1] << 32 | tokens[at]
            before.append(last.get(pair, 0))
            last[pair] = at
        best, most, end = 0, SHORTEST - 1, len(tokens) - 1
        place = before[-1] if before else 0
        for _ in range(PLACES):
            if not place or most == LONGEST:
                break
            same = SHORTEST
            while same < LONGEST and same <= place and tokens[place - same] == tokens[end - same]:
                same += 1
            if same > most:
                best, most = place, same
            place = before[place - 1]
        return best
