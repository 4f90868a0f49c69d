"""The scheduler: plan a step, commit its tokens, cancel. Continuous batching in pure Python, torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from model.sampler import Sampled
from server.engine.ledger import KVLedger
from server.engine.sequence import Event, Failed, Finished, Request, Sequence, Span, Started, Step, Token


class Scheduler:
    """Sequences join and leave at every step; nothing admitted is ever preempted.

    A step takes one row of every sequence that decodes, and beside them at most `prefill_chunk` rows of prompts, first
    come first served, so that a long prompt never stalls the running streams for longer than one chunk.
    """

    def __init__(self, ledger: KVLedger, prefill_chunk: int) -> None:
        self.ledger = ledger
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_id: dict[str, list[Sequence]] = {}
        self._freed: list[int] = []

    def submit(self, request: Request) -> None:
        """Puts the request's choices at the end of the queue."""
        sequences = [Sequence(request, index) for index in range(request.n)]
        self._by_id[request.id] = sequences
        self.waiting.extend(sequences)

    def plan(self) -> Step:
        """Admits what fits and chooses the rows of the next step."""
        started = self._admit()
        spans, budget = [], self.prefill_chunk
        for sequence in self.running:
            if sequence.held:
                continue
            rows = sequence.to_compute
            if rows > 1:
                rows = min(rows, budget)
                budget -= rows
            if rows:
                spans.append(Span(sequence, sequence.computed, sequence.computed + rows))
        return Step(self.take_freed(), tuple(spans), tuple(started))

    def take_freed(self) -> tuple[int, ...]:
        """Slots whose pages can go back to the operating system; each is told once."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def commit(self, step: Step, outcomes: Seq[Sampled | Exception]) -> list[Event]:
        """Books what a step computed; one outcome per span that samples, in order: the token, or what went wrong."""
        events: list[Event] = []
        results = iter(outcomes)
        for span in step.spans:
            sequence = span.sequence
            assert sequence.slot is not None
            sampled = span.samples
            sequence.computed = span.stop
            self.ledger.grow(sequence.slot, span.stop)
            if sampled:
                events += self._advance(sequence, next(results))
        return events

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Forgets a request, or one choice of it, wherever it is; its slots and bytes are free for the next plan.

        An id that is unknown, or has ended, is ignored.
        """
        for sequence in self._sequences(request_id):
            if index is None or sequence.index == index:
                self._drop(sequence)

    def hold(self, request_id: str, held: bool) -> None:
        """Lets a request sit out until its reader has caught up."""
        for sequence in self._sequences(request_id):
            sequence.held = held

    def longest_wait_steps(self) -> int:
        """Steps after which, at the latest, the first running sequence has ended and its slot is free."""
        return min((s.request.rows_max - s.computed for s in self.running if not s.held), default=0)

    def _sequences(self, request_id: str) -> list[Sequence]:
        return list(self._by_id.get(request_id, ()))

    def _admit(self) -> list[Started]:
        started = []
        while self.waiting:
            sequence = self.waiting[0]
            rows_max = sequence.request.rows_max
            slot = self.ledger.admit(sequence.request.id, rows_max)
            if slot is None:
                break
            self.waiting.popleft()
            sequence.slot = slot
            self.running.append(sequence)
            layout = self.ledger.layout
            held = layout.committed(len(sequence.request.prompt))
            started.append(Started(sequence.request.id, sequence.index, slot, held, layout.committed(rows_max)))
        return started

    def _advance(self, sequence: Sequence, outcome: Sampled | Exception) -> list[Event]:
        request = sequence.request
        if isinstance(outcome, Exception):
            self._drop(sequence)
            return [Failed(request.id, sequence.index, str(outcome))]
        token_id = outcome.token_id
        sequence.tokens.append(token_id)
        events: list[Event] = [Token(request.id, sequence.index, token_id, outcome.logprobs)]
        # an end token is an end even where it is also the last token allowed
        reason = (
            "stop" if token_id in request.stop_ids else "length" if sequence.generated == request.max_tokens else None
        )
        if reason:
            self._drop(sequence)
            events.append(Finished(request.id, sequence.index, reason))
        return events

    def _drop(self, sequence: Sequence) -> None:
        siblings = self._by_id[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_id[sequence.request.id]
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.ledger.release(sequence.slot)
            self._freed.append(sequence.slot)
