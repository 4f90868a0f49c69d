"""Usage: how much of max_tokens clients really use, learned from those that ended and those that run. Torch-free."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

REMEMBERED = 1000  # sequences that count, the last to end
KNOWN = 100  # of which so many must be there before anything is believed


def survival(used: Whole, by_itself: NDArray[np.bool_], longest: int) -> Floats:
    """S[t], the chance that a sequence grows beyond t rows, t = 0 ... longest (Kaplan and Meier 1958).

    used[i] rows were seen of sequence i; then it ended by itself (an event), or was cut or still runs (censored: it
    counts among those at risk up to there, and says nothing of what would have come).
    """
    ended = np.bincount(used[by_itself], minlength=longest + 1)[: longest + 1]
    gone = np.bincount(used, minlength=longest + 1)[: longest + 1]
    at_risk = gone[::-1].cumsum()[::-1]
    return np.cumprod(1.0 - ended / np.maximum(at_risk, 1))


class Usage:
    """The last `REMEMBERED` sequences, each as rows grown beyond its prompt and whether it ended by itself."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._past: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED)

    def ended(self, grown: int, by_itself: bool) -> None:
        self._past.append((grown, by_itself))

    def survival(self, running: list[int]) -> Floats | None:
        """S[t] with those that run now, grown so far; None while too little is known."""
        if len(self._past) < KNOWN:
            return None
        used = np.array([grown for grown, _ in self._past] + running, np.int64)
        by_itself = np.array([itself for _, itself in self._past] + [False] * len(running), bool)
        return survival(used, by_itself, self.longest)


class Expected:
    """Demand to be expected at every `GRID`-th coming step, in bytes: its mean, and its variance if each sequence ends
    on its own. `survival` is S[t], `curve` the bytes of so many rows."""

    GRID = 16

    def __init__(self, survival: Floats, curve: Whole) -> None:
        self._survival = survival
        self._curve = curve
        self._ahead = np.arange(0, 2 * len(curve), self.GRID)
        self.mean = self.variance = np.zeros(len(self._ahead))

    def add(self, claims: Whole) -> Expected:
        """With `claims` [B, 4] as well: rows held, how many of these were grown, rows still to come, steps until then.

        A sequence has curve[rows + s] bytes s steps later if it is still there; it ends between two steps of the grid.
        """
        rows, grown, left, delay = (claims[:, at, None] for at in range(4))  # [B, 1]
        steps = np.maximum(0, self._ahead - delay)  # [B, grid]
        there = steps < left + self.GRID
        steps = np.minimum(steps, left)
        bytes_ = self._curve[rows + steps]
        chance = there * self._survival[grown + steps] / np.maximum(self._survival[grown], 1e-9)
        together = Expected(self._survival, self._curve)
        together.mean = self.mean + (chance * bytes_).sum(axis=0)
        together.variance = self.variance + (chance * (1.0 - chance) * bytes_**2).sum(axis=0)
        return together

    def peak(self, deviations: float) -> float:
        return float((self.mean + deviations * np.sqrt(self.variance)).max())
