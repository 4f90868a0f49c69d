"""Sampler: each row of a step's logits, its own parameters, history and random number -> a token, and nothing else.

Order: repetition penalty, presence and frequency penalty, logit bias, tokens that may not come; then temperature,
top_k, top_p, min_p, each on what the one before has left. Ties go to the lower id. The draw inverts the cumulative
distribution in the order of ids.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]  # [S, vocab]
Row = NDArray[np.float32] | NDArray[np.float64]  # [vocab], or some values of it; in float64 once it is adjusted
Row64 = NDArray[np.float64]
Ids = NDArray[np.intp]

_BLOCK = 512  # neighbours that are summed up, or looked at, together
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class LogitsError(ArithmeticError):
    """A row of logits with NaN or +inf: the model, not the request, is broken there."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn. temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0, penalties at their defaults: off.

    `repetition_penalty` counts prompt and output (Keskar et al. 2019: a positive logit is divided by it, a negative
    one multiplied); `presence_penalty` and `frequency_penalty` count the output only (OpenAI: logit - presence -
    frequency x count). `min_tokens`: the end tokens may not come before so many. `logprobs`: None, or how many of the
    best to report.
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
        """Whether the history changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model's own distribution: of the token that came, and of the best (id, logprob)."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token and, when asked for, its logprobs."""

    token_id: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Draw:
    """What the token at `position` of a choice is drawn with.

    `prompt` and `output` are what the penalties count; no `forbidden` id can come, nor one not in `allowed` [vocab].
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
        """Whether it changes the logits."""
        return bool(self.params.penalises or self.params.logit_bias or self.forbidden or self.allowed is not None)


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one position of one choice: counter-based, no state is carried along."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Rows, draws: Sequence[Draw | Exception]) -> list[Sampled | Exception]:
    """The token of each row of logits [S, vocab], S >= len(draws); LogitsError for a row that is not finite.

    What stands in place of a draw because something failed before is that row's outcome.
    """
    best: list[int] = logits.argmax(axis=1).tolist()
    rows = zip(logits, best, draws, strict=False)
    return [draw if isinstance(draw, Exception) else _sample(row, at, draw) for row, at, draw in rows]


def _sample(logits: Row, best: int, draw: Draw) -> Sampled | LogitsError:
    row, params = logits, draw.params
    broken = _broken(row, best, draw)
    if broken is None and draw.adjusts:
        row = _adjusted(row, draw)
        best = int(row.argmax())
        broken = _broken(row, best, draw)
    if broken:
        return broken
    token_id = best if params.greedy or params.top_k == 1 else _drawn(row, float(row[best]), draw)
    return Sampled(token_id, None if params.logprobs is None else logprobs(logits, token_id, params.logprobs))


def logprobs(logits: Row, token_id: int, count: int) -> Logprobs:
    """log_softmax(logits) of one token and of the `count` best; finite, whatever the row holds."""
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    values = np.maximum(shifted, LOWEST_LOGPROB)
    best = _best(values, min(count, len(values))) if count else ()
    return Logprobs(float(values[token_id]), tuple((int(id), float(values[id])) for id in best))


def _broken(row: Row, best: int, draw: Draw) -> LogitsError | None:
    value = float(row[best])
    if math.isfinite(value):  # argmax finds NaN and +inf first
        return None
    return LogitsError(f"logits at position {draw.position} are not finite (token {best}: {value})")


def _adjusted(logits: Row, draw: Draw) -> Row64:
    """The logits after penalties and bias; what may not come is at minus infinity."""
    row, params = logits.astype(np.float64), draw.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*draw.prompt, *draw.output], dtype=np.intp))
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if draw.output and (params.presence_penalty or params.frequency_penalty):
        came, counts = np.unique(np.array(draw.output, dtype=np.intp), return_counts=True)
        row[came] -= params.presence_penalty + params.frequency_penalty * counts
    for id, bias in params.logit_bias:
        row[id] += bias
    if draw.forbidden:
        row[list(draw.forbidden)] = -np.inf
    if draw.allowed is not None:
        row[~draw.allowed] = -np.inf
    return row


def _drawn(row: Row, highest: float, draw: Draw) -> int:
    params = draw.params
    kept = _kept(row, highest, params)
    weights = _weights(row if kept is None else row[kept], highest, params.temperature)
    at = _inverted(weights, uniform(params.seed, draw.choice, draw.position))
    return at if kept is None else int(kept[at])


def _weights(values: Row, highest: float, temperature: float) -> Row64:
    """Probabilities as multiples of the highest one."""
    weights = np.subtract(values, highest, dtype=np.float64)
    if temperature != 1.0:
        weights /= temperature
    return np.exp(weights, out=weights)


def _inverted(weights: Row64, u: float) -> int:
    """The first place at which the sum up to and with it is more than u x the sum of all, by blocks, then in one."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    wanted = u * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    if block == len(ends):  # rounded up to the very end: the last block that has any probability
        block = int(np.searchsorted(ends, ends[-1], side="left"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = float(ends[block - 1]) if block else 0.0
    at = int(np.searchsorted(np.cumsum(inside) + before, wanted, side="right"))
    if at == len(inside):  # and the last place
        at = int(np.flatnonzero(inside)[-1])
    return block * _BLOCK + at


def _kept(row: Row, highest: float, params: SamplingParams) -> Ids | None:
    """Ids, ascending, that pass top_k, top_p and min_p; None when nothing is cut."""
    limit = params.top_k if 0 < params.top_k < len(row) else len(row)
    ids: Ids | None = None if limit == len(row) else _best(row, limit)
    if params.top_p < 1.0:
        total = _weights(row if ids is None else row[ids], highest, params.temperature).sum()
        ids = _nucleus(row, highest, params, params.top_p * float(total), limit)
    if params.min_p > 0.0:
        if ids is None:  # those that may pass, which are few
            line = params.temperature * math.log(params.min_p)
            ids = np.flatnonzero(row >= np.float64(highest + line - 1e-9 * (abs(highest) + abs(line))))
        ids = ids[_weights(row[ids], highest, params.temperature) >= params.min_p]
    return None if ids is None else np.sort(ids)


def _nucleus(row: Row, highest: float, params: SamplingParams, wanted: float, limit: int) -> Ids:
    """The fewest of the `limit` best ids whose mass reaches `wanted`; the one that crosses the line is in."""
    width = min(64, limit)
    while True:
        ids = _best(row, width)
        mass = np.cumsum(_weights(row[ids], highest, params.temperature))
        if mass[-1] >= wanted or width == limit:
            return ids[: int(np.searchsorted(mass, wanted, side="left")) + 1]
        width = min(8 * width, limit)


def _best(values: Row, count: int) -> Ids:
    """Ids of the `count` largest values, best first, equals in the order of ids; minus infinity may be left out."""
    ids = np.flatnonzero(values >= _line(values, count))
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _line(values: Row, count: int) -> float:
    """A finite value that at least `count` values reach, if so many are finite, and few more."""
    blocks = len(values) // _BLOCK
    peaks = values if count > blocks else values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    line = float(np.partition(peaks, -count)[-count])
    return line if math.isfinite(line) else float(np.finfo(values.dtype).min)
