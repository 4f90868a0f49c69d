"""The engine's sign of life: which round it is in, and how long that may take. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine's current round, and the seconds after which it counts as stuck."""

    round: int
    deadline_s: float


class StepDeadline:
    """How long a step may take: ten times the slowest of its size lately, and never less than FLOOR_S.

    A step that is slow because the model is big is no hang, so the bound is learned, by powers of two of the step's
    rows. A size not seen yet is assumed to cost as much per row as the next smaller one that was.
    """

    FLOOR_S = 1.25
    FACTOR = 10.0

    def __init__(self, one_row_s: float) -> None:
        self._slowest = {1: one_row_s}  # by bit length of the rows

    def of(self, rows: int) -> float:
        """Seconds that a step of `rows` rows may take."""
        size = rows.bit_length()
        known = max((at for at in self._slowest if at <= size), default=1)
        return max(self.FLOOR_S, self.FACTOR * self._slowest[known] * 2 ** max(0, size - known))

    def learn(self, rows: int, seconds: float) -> None:
        """A step took `seconds`; an outlier is forgotten after some tens of steps of its size."""
        size = rows.bit_length()
        self._slowest[size] = max(seconds, 0.95 * self._slowest.get(size, 0.0))
