"""Sampler: a logits row, its own parameters and its own random number -> a token. Nothing else goes in."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


class LogitsError(ArithmeticError):
    """A row of logits with NaN or +inf: the model, not the request, is broken there."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn. temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one position of one choice: counter-based, no state is carried along."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Row, params: SamplingParams, choice: int, position: int) -> int:
    """The token at `position` of a choice, from logits [vocab]. Raises LogitsError for a row that is not finite.

    Order: temperature, top_k, top_p, min_p, each on what the one before has left; ties go to the lower id; the draw
    inverts the cumulative distribution in the order of ids.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):  # argmax finds NaN and +inf first
        raise LogitsError(f"logits at position {position} are not finite (token {best}: {logits[best]})")
    if params.greedy or params.top_k == 1:
        return best
    scaled = (logits.astype(np.float64) - float(logits[best])) / params.temperature
    probabilities = np.exp(scaled)  # [vocab], the best has 1
    kept = _kept(scaled, probabilities, params)
    cumulative = np.cumsum(probabilities if kept is None else probabilities[kept])
    drawn = int(np.searchsorted(cumulative, uniform(params.seed, choice, position) * cumulative[-1], side="right"))
    drawn = min(drawn, len(cumulative) - 1)
    return drawn if kept is None else int(kept[drawn])


def _kept(
    scaled: NDArray[np.float64], probabilities: NDArray[np.float64], params: SamplingParams
) -> NDArray[np.intp] | None:
    """Ids, ascending, that pass top_k, top_p and min_p; None when nothing is cut."""
    vocab = len(scaled)
    cut_k = 0 < params.top_k < vocab
    if not cut_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    ids = np.argsort(-scaled, kind="stable")
    if cut_k:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum(probabilities[ids])
        # the smallest set whose mass reaches top_p: the token that crosses the line is in
        ids = ids[: int(np.searchsorted(mass, params.top_p * mass[-1], side="left")) + 1]
    if params.min_p > 0.0:
        ids = ids[probabilities[ids] >= params.min_p * probabilities[ids[0]]]
    return np.sort(ids)
