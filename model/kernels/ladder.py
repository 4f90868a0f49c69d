"""One ladder of tile heights: a step's rows are cut into tiles, whose heights are known when they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from tokenteller.model.kernels.target import EXACT


def ladder(tile: Callable[..., Any], highest: int) -> Callable[..., Any]:
    """climb(rows, args) -> the height of the highest tile that `rows` fill, computed by tile(height, args).

    tile: an intrinsic whose height must be a literal. Heights are `highest`, 4, 2 and 1.
    """

    @njit(**EXACT, inline="always")
    def climb(rows, args):  # type: ignore[no-untyped-def]
        if rows >= highest:
            tile(highest, args)
            done = highest
        elif rows >= 4:
            tile(4, args)
            done = 4
        elif rows >= 2:
            tile(2, args)
            done = 2
        else:
            tile(1, args)
            done = 1
        return done

    return climb
