"""The runner: Step -> Batch -> decoder -> sampler -> tokens. Owns the pool; nobody else touches it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress

import numba
import torch

from tokenteller.model.attention import Batch
from tokenteller.model.decoder import Decoder
from tokenteller.model.grammar import GrammarError
from tokenteller.model.kv_pool import KVPool
from tokenteller.model.linear import padded
from tokenteller.model.sampler import Draw, Rows, Sampled, SamplingParams, sample
from tokenteller.server.engine.sequence import Copy, Release, Request, Sequence, Span, Step


def use_threads(threads: int) -> None:
    """How many threads the maths of the calling thread may use; numba and OpenMP keep this number per thread."""
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def end_idle_threads() -> None:
    """Ends OpenMP's threads that helped the calling thread, which will compute no more.

    Counted with those of the engine they are more than there are CPUs, and libgomp then sends a thread to sleep as soon
    as it has to wait: at each of the 200 parts of a step.
    """
    with suppress(OSError, AttributeError):  # another OpenMP has no such rule
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(2)  # omp_pause_hard


class Runner:
    """Computes steps. `max_rows`: the largest step that will come; `threads`: how many compute it."""

    def __init__(self, decoder: Decoder, pool: KVPool, max_rows: int, threads: int) -> None:
        self.threads = threads
        self.decoder = decoder
        self.pool = pool
        self.safe_rows = decoder.safe_rows(max_rows)

    def warm_up(self) -> int:
        """Makes one token in the first slot and gives the slot back: what can break or is slow once, is so now."""
        request = Request("warm-up", prompt=(0,), max_tokens=1, sampling=SamplingParams(temperature=0.0))
        outcome = self.run(Step((), (Span(Sequence(request, slot=0), 0, 1),), ()))[0]
        self.move([Release(0)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.token_id

    def run(self, step: Step) -> list[Sampled | Exception]:
        """For each span that samples one outcome, and one more for each of its guesses, in the step's order."""
        self.move(step.moves)
        if not step.spans:
            return []
        for span in step.spans:
            assert span.sequence.slot is not None
            self.pool.make_way(span.sequence.slot, span.start, span.stop)
        logits = self.decoder.forward(self._batch(step), self.pool).numpy()  # [S, vocab]
        return _sample(logits, [span for span in step.spans if span.samples])

    def move(self, moves: Iterable[Release | Copy]) -> None:
        """Copies rows between slots and gives pages back, in this order."""
        for move in moves:
            if isinstance(move, Copy):
                self.pool.copy(move.source, move.target, move.rows)
            else:
                self.pool.release(move.slot, move.keep)

    def _batch(self, step: Step) -> Batch:
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        sample_rows: list[int] = []
        for span in step.spans:
            assert span.sequence.slot is not None
            tokens += span.sequence.tokens[span.start : span.stop]
            tokens += span.draft
            slots += [span.sequence.slot] * (span.stop - span.start)
            positions += range(span.start, span.stop)
            if span.samples:
                sample_rows += range(len(tokens) - 1 - len(span.draft), len(tokens))
        tokens += [0] * (padded(len(tokens), self.safe_rows) - len(tokens))
        sample_rows += [0] * (padded(len(sample_rows), self.safe_rows) - len(sample_rows))
        return Batch(*(torch.tensor(part, dtype=torch.int64) for part in (tokens, slots, positions, sample_rows)))


def _sample(logits: Rows, spans: list[Span]) -> list[Sampled | Exception]:
    """The next token of each span, and that after each of its guesses, from logits [S, vocab]; padding may follow."""
    draws = [(span.sequence, span.draft[:at]) for span in spans for at in range(len(span.draft) + 1)]
    outcomes = sample(logits, [_draw(sequence, guesses) for sequence, guesses in draws])
    for (sequence, _), outcome in zip(draws, outcomes, strict=True):
        matcher = sequence.matcher
        if matcher and isinstance(outcome, Sampled) and outcome.token_id not in sequence.request.stop_ids:
            matcher.advance(outcome.token_id)
    return outcomes


def _draw(sequence: Sequence, guesses: Seq[int]) -> Draw | GrammarError:
    """What the token after those of a sequence and some guesses is drawn with."""
    request, params, matcher = sequence.request, sequence.request.sampling, sequence.matcher
    draw = Draw(params, sequence.index, len(sequence.tokens) + len(guesses))
    if params.penalises:
        draw.prompt, draw.output = request.prompt, [*sequence.tokens[len(request.prompt) :], *guesses]
    if sequence.generated + len(guesses) < params.min_tokens:
        draw.forbidden = request.stop_ids
    if matcher:
        try:
            draw.allowed = matcher.allowed()
        except GrammarError as error:
            return error
    return draw
