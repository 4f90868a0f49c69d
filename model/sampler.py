"""The sampler: one row of logits, its parameters, its history and one random number give one token.

Order: repetition penalty, presence and frequency penalties, logit bias, banned tokens; then temperature, top_k, top_p
and min_p, each applied to what the previous one left. Ties go to the lower id. The draw inverts the cumulative
distribution in id order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenteller.model import top_p
from tokenteller.model.top_p import BLOCK, Ids, Row, Row64, token_weights

Rows = NDArray[np.float32]  # [S, vocab]

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
WIDE_VOCABULARY = 8192  # from here on, sorting costs more than top_p.draw ...
NARROW = 64  # ... unless the nucleus is smaller than this


class LogitsError(ArithmeticError):
    """A row of logits holds NaN or +inf. The model is at fault, not the request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a token. Off: top_k 0 or -1, top_p 1, min_p 0, penalties at their defaults. temperature 0 is greedy.

    `repetition_penalty` applies to prompt and output (Keskar et al. 2019: positive logits are divided by it, negative
    ones multiplied). `presence_penalty` and `frequency_penalty` apply to the output only (OpenAI: logit - presence -
    frequency x count). End tokens are banned until `min_tokens` have been generated. `logprobs`: how many of the most
    likely tokens to report, or None.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model's own distribution: the drawn token's, and the most likely (id, logprob)."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token and, if requested, its logprobs."""

    token_id: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Draw:
    """All that the token at `position` of a choice depends on, besides its logits.

    `prompt` and `output`: the tokens that penalties look at. Ids in `forbidden` are banned, and so are those not in
    the mask `allowed` [vocab].
    """

    params: SamplingParams
    choice: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    forbidden: Collection[int] = ()
    allowed: NDArray[np.bool_] | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the logits have to be changed before drawing."""
        return bool(self.params.penalises or self.params.logit_bias or self.forbidden or self.allowed is not None)


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) for one position of one choice. Counter-based: there is no state to carry."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Rows, draws: Sequence[Draw | Exception]) -> list[Sampled | Exception]:
    """One outcome per draw, from logits [S, vocab], S >= len(draws); LogitsError for a row that is not finite.

    An exception in place of a draw is passed through as that row's outcome.
    """
    best: list[int] = logits.argmax(axis=1).tolist()
    rows = zip(logits, best, draws, strict=False)
    return [draw if isinstance(draw, Exception) else _sample(row, at, draw) for row, at, draw in rows]


def _sample(logits: Row, best: int, draw: Draw) -> Sampled | LogitsError:
    row, params = logits, draw.params
    error = _not_finite(row, best, draw)
    if error is None and draw.adjusts:
        row = _adjusted(row, draw)
        best = int(row.argmax())
        error = _not_finite(row, best, draw)
    if error:
        return error
    token_id = best if params.greedy or params.top_k == 1 else _drawn(row, float(row[best]), draw)
    return Sampled(token_id, None if params.logprobs is None else logprobs(logits, token_id, params.logprobs))


def logprobs(logits: Row, token_id: int, count: int) -> Logprobs:
    """log_softmax(logits) of one token and of the `count` most likely. Always finite."""
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    values = np.maximum(shifted, LOWEST_LOGPROB)
    best = _best(values, min(count, len(values))) if count else ()
    return Logprobs(float(values[token_id]), tuple((int(id), float(values[id])) for id in best))


def _not_finite(row: Row, best: int, draw: Draw) -> LogitsError | None:
    value = float(row[best])
    if math.isfinite(value):  # argmax prefers NaN and +inf to everything else
        return None
    return LogitsError(f"logits at position {draw.position} are not finite (token {best}: {value})")


def _adjusted(logits: Row, draw: Draw) -> Row64:
    """The logits after penalties and bias, with banned tokens at minus infinity."""
    row, params = logits.astype(np.float64), draw.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*draw.prompt, *draw.output], dtype=np.intp))
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if draw.output and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.array(draw.output, dtype=np.intp), return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts
    for id, bias in params.logit_bias:
        row[id] += bias
    if draw.forbidden:
        row[list(draw.forbidden)] = -np.inf
    if draw.allowed is not None:
        row[~draw.allowed] = -np.inf
    return row


def _drawn(row: Row, highest: float, draw: Draw) -> int:
    params, u = draw.params, uniform(draw.params.seed, draw.choice, draw.position)
    kept = None
    if params.top_p < 1.0 and params.min_p == 0.0 and not 0 < params.top_k < len(row) and len(row) >= WIDE_VOCABULARY:
        weights = token_weights(row, highest, params.temperature)
        target = params.top_p * float(weights.sum())
        if target < NARROW:  # no weight is above 1, so fewer tokens than this could reach it
            kept = np.sort(_nucleus(row, highest, params, target, NARROW))
        if kept is None or len(kept) == NARROW:
            token_id = top_p.draw(row, weights, target, highest, params.temperature, u)
            if token_id is not None:
                return token_id
            kept = None
    if kept is None:
        kept = _kept(row, highest, params)
    at = _inverted(token_weights(row if kept is None else row[kept], highest, params.temperature), u)
    return at if kept is None else int(kept[at])


def _inverted(weights: Row64, u: float) -> int:
    """The first index whose cumulative weight exceeds u x total: finds the block, then the place inside it."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)))
    target = u * ends[-1]
    block = int(np.searchsorted(ends, target, side="right"))
    if block == len(ends):  # the product was rounded up to the total: take the last block with any weight
        block = int(np.searchsorted(ends, ends[-1], side="left"))
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    before = float(ends[block - 1]) if block else 0.0
    at = int(np.searchsorted(np.cumsum(inside) + before, target, side="right"))
    if at == len(inside):  # the same rounding, inside the block
        at = int(np.flatnonzero(inside)[-1])
    return block * BLOCK + at


def _kept(row: Row, highest: float, params: SamplingParams) -> Ids | None:
    """Ids, ascending, that pass top_k, top_p and min_p; None if all of them do."""
    limit = params.top_k if 0 < params.top_k < len(row) else len(row)
    ids: Ids | None = None if limit == len(row) else _best(row, limit)
    if params.top_p < 1.0:
        total = token_weights(row if ids is None else row[ids], highest, params.temperature).sum()
        ids = _nucleus(row, highest, params, params.top_p * float(total), limit)
    if params.min_p > 0.0:
        if ids is None:  # preselect with some slack, then test the few that are left exactly
            line = params.temperature * math.log(params.min_p)
            ids = np.flatnonzero(row >= np.float64(highest + line - 1e-9 * (abs(highest) + abs(line))))
        ids = ids[token_weights(row[ids], highest, params.temperature) >= params.min_p]
    return None if ids is None else np.sort(ids)


def _nucleus(row: Row, highest: float, params: SamplingParams, target: float, limit: int) -> Ids:
    """The fewest of the `limit` best ids whose weight reaches `target`, including the one that crosses it."""
    width = min(NARROW, limit)
    while True:
        ids = _best(row, width)
        mass = np.cumsum(token_weights(row[ids], highest, params.temperature))
        if mass[-1] >= target or width == limit:
            return ids[: int(np.searchsorted(mass, target, side="left")) + 1]
        width = min(8 * width, limit)


def _best(values: Row, count: int) -> Ids:
    """Ids of the `count` largest values, best first, ties by id. Values of minus infinity may be left out."""
    ids = np.flatnonzero(values >= _lower_bound(values, count))
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _lower_bound(values: Row, count: int) -> float:
    """A finite value that `count` values reach (if that many are finite), and not many more."""
    blocks = len(values) // BLOCK
    peaks = values if count > blocks else values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
    bound = float(np.partition(peaks, -count)[-count])
    return bound if math.isfinite(bound) else float(np.finfo(values.dtype).min)
