"""top_p on a wide, flat row: the token that sorting the whole row would draw, without sorting it.

The nucleus is every value above a cut, and the first few that equal it. A sorted sample of the row says roughly where
the cut is, so only the values near it are sorted. Sums are compared with a margin beyond any rounding error: where one
comes closer to its threshold than that, the answer is None and the caller sorts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32] | NDArray[np.float64]  # [vocab]; float64 once penalties or bias have been applied
Row64 = NDArray[np.float64]
Ids = NDArray[np.intp]

BLOCK = 512  # neighbours that are summed together
_STRIDE = 48  # every 48th value is in the sample
_WINDOW = 48  # sampled values from one threshold to the next: about 2,300 values of the row


def token_weights(values: Row, highest: float, temperature: float) -> Row64:
    """Probabilities, unnormalised: the most likely token has weight 1."""
    weights = np.subtract(values, highest, dtype=np.float64)
    if temperature != 1.0:
        weights /= temperature
    return np.exp(weights, out=weights)


def draw(row: Row, weights: Row64, target: float, highest: float, temperature: float, u: float) -> int | None:
    """The token for `u` in [0, 1) among the fewest that weigh `target` together; None where it is too close to say.

    `weights`: token_weights(row), overwritten.
    """
    nucleus = _Nucleus(row, weights, target, highest, temperature)
    return nucleus.pick(u) if nucleus.find_cut() else None


class _Nucleus:
    """`by_block`: the weight of all values above `high`, summed by block; after find_cut, that of the nucleus."""

    def __init__(self, row: Row, weights: Row64, target: float, highest: float, temperature: float) -> None:
        self.row, self.highest, self.temperature, self.target = row, highest, temperature, target
        total = float(weights.sum())
        sample = row[::_STRIDE].copy()
        sample.sort()
        self.sample = sample[::-1]
        sample_weights = self._weigh(self.sample)
        mass = np.cumsum(sample_weights)
        self.at, step = int(np.searchsorted(mass, target / total * mass[-1])) - _WINDOW // 2, _WINDOW
        while self.at > 0:
            self.by_block = self._above(weights, float(self.sample[self.at]), float(sample_weights[self.at]))
            if self.by_block.sum() < self.target:
                break
            self.at, step = self.at - step, 2 * step
        else:
            self.at, self.by_block = 0, np.zeros(-(-len(row) // BLOCK))
        self.high = float(self.sample[self.at]) if self.at else math.inf
        largest_sum = total + len(row) * float(sample_weights[self.at])
        self.margin = len(row) * float(np.finfo(np.float64).eps) * largest_sum
        self.cut, self.last_tie = math.inf, 0

    def _weigh(self, values: Row) -> Row64:
        return token_weights(values, self.highest, self.temperature)

    def _above(self, weights: Row64, value: float, weight: float) -> Row64:
        """Block sums of the values above `value`. Masks are slow in numpy, so raise all others to `weight`, in place,
        and subtract that as often as there are others."""
        starts = np.arange(0, len(weights), BLOCK)
        raised = np.add.reduceat(np.maximum(weights, weight, out=weights), starts)
        others = np.zeros(len(starts) * BLOCK // 8, np.uint8)
        bits = np.packbits(self.row <= value)
        others[: len(bits)] = bits
        return raised - weight * np.bitwise_count(others.view(np.uint64)).reshape(len(starts), -1).sum(axis=1)

    def find_cut(self) -> bool:
        """Goes down from `high`, one window after another, to the target. False if it is too close to say."""
        while self.at < len(self.sample):
            self.at += _WINDOW
            low = float(self.sample[self.at]) if self.at < len(self.sample) else -math.inf
            ids = np.flatnonzero((self.row <= self.high) & (self.row > low))
            values = self.row[ids]
            values.sort()
            values = values[::-1]
            missing = self.target - float(self.by_block.sum())
            mass = np.cumsum(self._weigh(values))
            edge = int(np.searchsorted(mass, missing))
            if edge < len(ids):
                before = float(mass[edge - 1]) if edge else 0.0
                self._cut_at(ids, values, edge)
                return min(missing - before, mass[edge] - missing) > self.margin
            self._add(ids)
            self.high = low
        return False

    def _cut_at(self, ids: Ids, ordered: Row, edge: int) -> None:
        """The nucleus ends with ordered[edge]. Of the ids that have this value, the lowest are in."""
        self.cut = float(ordered[edge])
        values = self.row[ids]
        ties = ids[values == self.cut]
        self.last_tie = int(ties[edge - np.count_nonzero(values > self.cut)])
        self._add(ids[(values > self.cut) | ((values == self.cut) & (ids <= self.last_tie))])

    def _add(self, ids: Ids) -> None:
        self.by_block += np.bincount(ids // BLOCK, self._weigh(self.row[ids]), len(self.by_block))

    def pick(self, u: float) -> int | None:
        """The first kept token whose cumulative weight, in id order, exceeds u x total. None if too close to say."""
        ends = np.cumsum(self.by_block)
        target = u * float(ends[-1])
        block = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
        first = block * BLOCK
        values = self.row[first : first + BLOCK]
        tied = (values == self.cut) & (np.arange(first, first + len(values)) <= self.last_tie)
        before = float(ends[block - 1]) if block else 0.0
        mass = np.cumsum(self._weigh(values) * ((values > self.cut) | tied)) + before
        at = int(np.searchsorted(mass, target, side="right"))
        before = float(mass[at - 1]) if at else before
        clear = at < len(mass) and min(target - before, mass[at] - target) > self.margin
        return first + at if clear else None
