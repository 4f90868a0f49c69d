"""StepCost: how long a step takes, learned from the steps so far. Torch-free."""

from __future__ import annotations

_MIN_SPREAD = 0.05  # variance of the steps' rows, over their squared mean, below which no slope can be learned
_DECAY = 0.94  # weight of the past at each new step: about the last 16 count


class StepCost:
    """seconds = base + slope x rows, a least-squares fit with exponentially decaying weights."""

    def __init__(self) -> None:
        self.base = self.slope = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        if self._n > 10:
            seconds = min(seconds, 4 * self.predict(rows) + 1e-3)  # an outlier, such as the machine asleep
        self._n = _DECAY * self._n + 1
        self._x = _DECAY * self._x + rows
        self._y = _DECAY * self._y + seconds
        self._xx = _DECAY * self._xx + rows * rows
        self._xy = _DECAY * self._xy + rows * seconds
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread > _MIN_SPREAD * mean_x * mean_x:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            if slope > 0.0:  # otherwise it is noise: rows are never free
                self.slope = slope
        self.slope = min(self.slope, mean_y / mean_x)  # the base is never negative
        self.base = max(0.0, mean_y - self.slope * mean_x)

    def predict(self, rows: float) -> float:
        return self.base + self.slope * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """Rows that a step can compute in `seconds`, at most `most`; 0 until the cost of a row is known."""
        if self.slope <= 0.0:
            return 0
        return max(0, min(most, int((seconds - self.base) / self.slope)))
