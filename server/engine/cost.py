"""StepCost: what a step costs, learned from the steps that were computed. Torch-free."""

from __future__ import annotations

_TELLING = 0.05  # spread of the steps' rows, relative to their mean squared, from which on a slope is learned
_FORGET = 0.94  # weight of the past at each new step: about the last 16 count


class StepCost:
    """seconds = base + slope x rows, fitted by least squares over the recent steps (each weighs 0.94 of the next)."""

    def __init__(self) -> None:
        self.base = self.slope = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """One step has computed `rows` rows in `seconds`."""
        if self._n > 10:
            seconds = min(seconds, 4 * self.predict(rows) + 1e-3)  # a hiccup of the machine is not the cost of a step
        keep = _FORGET
        self._n = keep * self._n + 1
        self._x = keep * self._x + rows
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + rows * rows
        self._xy = keep * self._xy + rows * seconds
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread > _TELLING * mean_x * mean_x:  # else all were about as large: what a row costs stays as it was
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            if slope > 0.0:  # that rows cost nothing, only noise says
                self.slope = slope
        self.slope = min(self.slope, mean_y / mean_x)  # a step of no rows costs nothing, not less
        self.base = max(0.0, mean_y - self.slope * mean_x)

    def predict(self, rows: float) -> float:
        return self.base + self.slope * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """Rows that a step can compute in `seconds`, at most `most`; 0 as long as nobody knows what a row costs."""
        if self.slope <= 0.0:
            return 0
        return max(0, min(most, int((seconds - self.base) / self.slope)))
