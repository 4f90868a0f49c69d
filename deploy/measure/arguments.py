"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(least: float, kind: type[int] | type[float] = int, above: bool = False) -> Callable[[str], float]:
    """A finite number of at least `least`, or above it."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least):
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun} {'above' if above else 'of at least'} {least:g}")
        return value

    return parse
