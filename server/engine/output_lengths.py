"""OutputLengths: how much of max_tokens clients really use, learned from the sequences seen. Torch-free."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

REMEMBERED = 1000  # the last sequences to end
ENOUGH = 100  # of them must be known before they are used


def survival(generated: Integers, by_itself: NDArray[np.bool_], longest: int) -> Floats:
    """S[t], the chance that a sequence grows beyond t rows, t = 0 ... longest (Kaplan and Meier 1958).

    generated[i]: rows that sequence i grew by before it ended by itself (an event), or was cut off or still runs
    (censored: at risk up to there, and no evidence of what would have come after).
    """
    ended = np.bincount(generated[by_itself], minlength=longest + 1)[: longest + 1]
    left = np.bincount(generated, minlength=longest + 1)[: longest + 1]
    at_risk = left[::-1].cumsum()[::-1]
    return np.cumprod(1.0 - ended / np.maximum(at_risk, 1))


class OutputLengths:
    """The last `REMEMBERED` sequences: rows grown beyond the prompt, and whether each ended by itself."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._past: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED)

    def ended(self, generated: int, by_itself: bool) -> None:
        self._past.append((generated, by_itself))

    def survival(self, running: list[int]) -> Floats | None:
        """S[t], with the rows that running sequences have generated so far; None while too little is known."""
        if len(self._past) < ENOUGH:
            return None
        generated = np.array([rows for rows, _ in self._past] + running, np.int64)
        by_itself = np.array([itself for _, itself in self._past] + [False] * len(running), bool)
        return survival(generated, by_itself, self.longest)


class ExpectedDemand:
    """Mean and variance of the bytes held at every `GRID`-th coming step, each sequence ending independently.

    survival: S[t]. curve[n]: bytes of n rows.
    """

    GRID = 16

    def __init__(self, survival: Floats, curve: Integers) -> None:
        self._survival = survival
        self._curve = curve
        self._ahead = np.arange(0, 2 * len(curve), self.GRID)
        self.mean = self.variance = np.zeros(len(self._ahead))

    def add(self, claims: Integers) -> ExpectedDemand:
        """With `claims` [B, 4] added: rows held, how many of them generated, rows still to come, steps until the next.

        A sequence holds curve[rows + s] bytes s steps later if it has not ended. It is counted up to the grid step
        after its end, so that the sum is never too small.
        """
        rows, generated, left, delay = (claims[:, at, None] for at in range(4))  # [B, 1]
        steps = np.maximum(0, self._ahead - delay)  # [B, grid]
        there = steps < left + self.GRID
        steps = np.minimum(steps, left)
        bytes_ = self._curve[rows + steps]
        chance = there * self._survival[generated + steps] / np.maximum(self._survival[generated], 1e-9)
        together = ExpectedDemand(self._survival, self._curve)
        together.mean = self.mean + (chance * bytes_).sum(axis=0)
        together.variance = self.variance + (chance * (1.0 - chance) * bytes_**2).sum(axis=0)
        return together

    def peak(self, deviations: float) -> float:
        return float((self.mean + deviations * np.sqrt(self.variance)).max())
