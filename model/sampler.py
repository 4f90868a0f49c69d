"""Sampler: a logits row, its own parameters, its own history and its own random number -> a token, and nothing else.

Order: repetition penalty, presence and frequency penalty, logit bias, tokens that may not come; then temperature,
top_k, top_p, min_p, each on what the one before has left. Ties go to the lower id. The draw inverts the cumulative
distribution in the order of ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Row64 = NDArray[np.float64]
Ids = NDArray[np.intp]

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


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one position of one choice: counter-based, no state is carried along."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: Row,
    params: SamplingParams,
    choice: int,
    position: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: Collection[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> Sampled:
    """The token at `position` of a choice, from logits [vocab]. Raises LogitsError for a row that is not finite.

    `prompt` and `output` are what the penalties count; no `forbidden` id can come, nor one not in `allowed` [vocab].
    """
    row: Row | Row64 = logits
    _refuse_broken(logits, position)
    if params.penalises or params.logit_bias or forbidden or allowed is not None:
        row = _adjusted(logits, params, prompt, output, forbidden, allowed)
        _refuse_broken(row, position)
    token_id = _draw(row, params, choice, position)
    return Sampled(token_id, None if params.logprobs is None else logprobs(logits, token_id, params.logprobs))


def logprobs(logits: Row, token_id: int, count: int) -> Logprobs:
    """log_softmax(logits) of one token and of the `count` best; finite, whatever the row holds."""
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    values = np.maximum(shifted, LOWEST_LOGPROB)
    best = _best(values, min(count, len(values))) if count else ()
    return Logprobs(float(values[token_id]), tuple((int(id), float(values[id])) for id in best))


def _refuse_broken(row: Row | Row64, position: int) -> None:
    best = int(row.argmax())
    if not np.isfinite(row[best]):  # argmax finds NaN and +inf first
        raise LogitsError(f"logits at position {position} are not finite (token {best}: {row[best]})")


def _adjusted(
    logits: Row,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    forbidden: Collection[int],
    allowed: NDArray[np.bool_] | None,
) -> Row64:
    """The logits after penalties and bias; what may not come is at minus infinity."""
    row = logits.astype(np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *output], dtype=np.intp))
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        came, counts = np.unique(np.array(output, dtype=np.intp), return_counts=True)
        row[came] -= params.presence_penalty + params.frequency_penalty * counts
    for id, bias in params.logit_bias:
        row[id] += bias
    if forbidden:
        row[list(forbidden)] = -np.inf
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def _draw(row: Row | Row64, params: SamplingParams, choice: int, position: int) -> int:
    best = int(row.argmax())
    if params.greedy or params.top_k == 1:
        return best
    scaled = (row.astype(np.float64) - float(row[best])) / params.temperature
    probabilities = np.exp(scaled)  # [vocab], the best has 1
    kept = _kept(scaled, probabilities, params)
    cumulative = np.cumsum(probabilities if kept is None else probabilities[kept])
    at = int(np.searchsorted(cumulative, uniform(params.seed, choice, position) * cumulative[-1], side="right"))
    if at == len(cumulative):  # rounded up to the very end: the last token that has any probability
        at = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return at if kept is None else int(kept[at])


def _kept(scaled: Row64, probabilities: Row64, params: SamplingParams) -> Ids | None:
    """Ids, ascending, that pass top_k, top_p and min_p; None when nothing is cut."""
    limit = params.top_k if 0 < params.top_k < len(scaled) else len(scaled)
    ids: Ids | None = None if limit == len(scaled) else _best(scaled, limit)
    if params.top_p < 1.0:
        wanted = params.top_p * float((probabilities if ids is None else probabilities[ids]).sum())
        ids = _nucleus(scaled, probabilities, wanted, limit)
    if params.min_p > 0.0:  # the best has probability 1 here
        ids = np.flatnonzero(probabilities >= params.min_p) if ids is None else ids[probabilities[ids] >= params.min_p]
    return None if ids is None else np.sort(ids)


def _nucleus(scaled: Row64, probabilities: Row64, wanted: float, limit: int) -> Ids:
    """The fewest of the `limit` best ids whose mass reaches `wanted`; the one that crosses the line is in."""
    width = min(64, limit)
    while True:
        ids = _best(scaled, width)
        mass = np.cumsum(probabilities[ids])
        if mass[-1] >= wanted or width == limit:
            return ids[: int(np.searchsorted(mass, wanted, side="left")) + 1]
        width = min(8 * width, limit)


def _best(values: Row64, count: int) -> Ids:
    """Ids of the `count` largest values, best first, equals in the order of ids; one pass over the rest."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    line = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > line)
    level = np.flatnonzero(values == line)[: count - len(above)]
    ids = np.sort(np.concatenate((above, level)))
    return ids[np.argsort(-values[ids], kind="stable")]
