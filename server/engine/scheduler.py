"""The scheduler: plan a step, commit its tokens, cancel. Continuous batching in pure Python, torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import count

from tokenteller.model.grammar import GrammarError
from tokenteller.model.sampler import Sampled
from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.batching import Batcher
from tokenteller.server.engine.decision_log import DecisionLog
from tokenteller.server.engine.demand import Demand
from tokenteller.server.engine.drafting import Drafter
from tokenteller.server.engine.prefix_cache import PrefixCache
from tokenteller.server.engine.request_queue import BYPASS_LIMIT, RequestQueue
from tokenteller.server.engine.sequence import (
    NEVER,
    Blame,
    Copy,
    Event,
    Failed,
    Finished,
    Release,
    Request,
    Reused,
    Sequence,
    Span,
    Started,
    Step,
    Token,
)
from tokenteller.server.engine.step_cost import StepCost

PRIORITY_S = 10.0  # a request overtakes those of the next lower priority that came at most so long before it


class Scheduler:
    """Sequences join and leave at every step; nothing admitted is ever preempted."""

    def __init__(
        self,
        admission: Admission,
        prefill_chunk: int,
        *,
        token_gap_s: float | None = None,
        hold_limit_s: float = 30.0,
        draft_tokens: int = 0,
        bypass_limit: int = BYPASS_LIMIT,
        explain: bool = False,
    ) -> None:
        """hold_limit_s: how long a slow reader may hold its sequence. draft_tokens: the most per sequence and step."""
        self.admission = admission
        self.ledger = admission.ledger
        self.timeline = admission.timeline
        self.hold_limit_s = hold_limit_s
        self.cost = StepCost()
        self.log = DecisionLog(admission, explain)
        self.counts = self.log.counts
        self.running: list[Sequence] = []  # in the order of admission
        self.queue = RequestQueue(admission, self.log, bypass_limit)
        self.waiting = self.queue.waiting
        self.cache = PrefixCache(self.ledger, self.running, self.log)
        self.drafter = Drafter(self.ledger, self.cost, self.counts, draft_tokens)
        self.batcher = Batcher(admission, self.cache, self.drafter, self.cost, self.log, prefill_chunk, token_gap_s)
        self._live: dict[str, list[Sequence]] = {}  # by request id, until they end
        self._unstarted: set[str] = set()  # requests that have not had a slot yet
        self._expiry = math.inf  # no deadline passes before
        self._serial = count()
        self._events: list[Event] = []
        self._began: float | None = None  # the step under way: when the last one ended, unless the engine was idle

    def sequences(self, request_id: str) -> list[Sequence]:
        """The choices of a request that have not ended."""
        return list(self._live.get(request_id, ()))

    # The verbs

    def submit(self, request: Request, now: float) -> None:
        """Puts a request's choices in the queue. now: seconds of the engine's clock."""
        sequences = [Sequence(request, index) for index in range(request.n)]
        self._live[request.id] = sequences.copy()
        for sequence in sequences:
            sequence.order = (now + PRIORITY_S * request.priority, next(self._serial))
            self.queue.add(sequence)
        self._unstarted.add(request.id)
        self._expiry = min(self._expiry, self._expires(request))

    def plan(self, now: float) -> Step:
        """Admits whoever may start, and chooses what the next step computes."""
        if self._began is None:
            self._began = now
        if self._expiry <= now:
            self._expire(now)
        for sequence in self.running:
            # before a start can take the slot of a source that has just ended
            if sequence.source is not None and self.cache.copy_if_computed(sequence):
                self._events.append(Reused(sequence.request.id, sequence.index, sequence.cached))
        spans = self._admit_and_choose()
        while not spans and self._skip_step():
            self._replan_stalled()
            spans = self._admit_and_choose()
        events, self._events = tuple(self._events), []
        return Step(self.cache.take_moves(), tuple(spans), events)

    def commit(self, step: Step, outcomes: Seq[Sampled | Exception], now: float) -> list[Event]:
        """Records what a step computed. Outcomes: tokens or errors, in order, one of each span that samples, followed
        by one of each of its draft tokens."""
        began, self._began = self._began, now if step.spans else None
        if not step.spans:
            self._replan_stalled()
            return []
        assert began is not None
        self.cost.observe(step.rows, now - began)
        self.timeline.advance()
        events: list[Event] = []
        spans: Seq[Span] = step.spans
        if len(outcomes) > len(spans):  # there are draft tokens
            spans, outcomes = self.drafter.accept(spans, outcomes)
        results = iter(outcomes)
        for span in spans:  # this runs for every token
            sequence, stop = span.sequence, span.stop
            allocation, tokens = sequence.allocation, sequence.tokens
            assert allocation is not None and sequence.slot is not None
            sequence.computed = stop
            if stop <= allocation.capacity:
                allocation.rows = stop
            else:
                self.ledger.grow(sequence.slot, stop)
            if stop < len(tokens):
                continue
            outcome, request = next(results), sequence.request
            if isinstance(outcome, Exception):
                self._end(sequence, keep=False)
                events.append(_failed(sequence, outcome))
                continue
            token_id = outcome.token_id
            tokens.append(token_id)
            events.append(Token(request.id, sequence.index, token_id, outcome.logprobs))
            if token_id in request.stop_ids:  # 'stop' even if it is the last token allowed
                self._end(sequence, by_itself=True)
                events.append(Finished(request.id, sequence.index, "stop"))
            elif len(tokens) == sequence.max_length:
                self._end(sequence)
                events.append(Finished(request.id, sequence.index, "length"))
            elif sequence.decodes_from == NEVER:
                self.admission.replan(sequence)  # its prompt may have been computed earlier than planned
        self._replan_stalled()
        return events

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Drops a request, or one choice of it, wherever it is; its slots and bytes are free for the next plan.

        An id that is unknown or has ended is ignored.
        """
        for sequence in self.sequences(request_id):
            if index is None or sequence.index == index:
                self._end(sequence)

    def hold(self, request_id: str, held: bool) -> None:
        """Pauses a request until its reader has caught up; meanwhile it is charged its maximum."""
        for sequence in self.sequences(request_id):
            if sequence.held != held:
                sequence.held = held
                if sequence.slot is not None:
                    self._replan(sequence)
                    self.queue.released += 1

    def take_moves(self) -> tuple[Release | Copy, ...]:
        """What is to be done in the pool, outside of a step."""
        return self.cache.take_moves()

    def next_expiry(self) -> float | None:
        """When plan() has something to do even if nothing else happens."""
        self._expire(-math.inf)
        return None if self._expiry == math.inf else self._expiry

    def check(self) -> None:
        """Proves that all records agree; for tests and for idle moments."""
        ledger, timeline = self.ledger, self.timeline
        ledger.check()
        self.cache.check()
        assert self.admission.banker.safe()
        assert {s.slot: s.allocation for s in self.running} == ledger.allocations
        for s in self.running:
            assert s.allocation and s.computed == s.allocation.rows
            assert s.decodes_from == (s.allocation.demand.ready + 1 if s.generated and not s.held else NEVER)
            assert s.held or s.allocation.demand.end >= timeline.now, "it has outlived its demand"
        assert self.waiting == sorted(self.waiting, key=lambda s: s.order)
        demands = [a.demand for a in ledger.allocations.values()] + [
            s.reservation for s in self.waiting if s.reservation
        ]
        last = max((demand.end for demand in demands), default=timeline.now)
        totals = timeline.totals(timeline.now, last + 100 - timeline.now).copy()
        for demand in demands:
            amounts, at = demand.from_step(timeline.now), max(demand.begin - timeline.now, 0)
            totals[:, at : at + amounts.shape[1]] -= amounts
        assert not totals.any(), "the timeline is the sum of all demands"

    # Steps

    def _expires(self, request: Request) -> float:
        times = [request.deadline, request.start_by if request.id in self._unstarted else None]
        return min((time for time in times if time is not None), default=math.inf)

    def _expire(self, now: float) -> None:
        """Ends what has run out of time, and finds out when something next does."""
        self._expiry = math.inf
        for sequences in list(self._live.values()):
            expires = self._expires(sequences[0].request)
            if expires > now:
                self._expiry = min(self._expiry, expires)
                continue
            for sequence in sequences.copy():
                self._events.append(Finished(sequence.request.id, sequence.index, "deadline"))
                self._end(sequence)

    def _admit_and_choose(self) -> list[Span]:
        for sequence in self.running:
            if sequence.held and sequence.allocation and sequence.allocation.demand.end <= self.timeline.now:
                self._replan(sequence)  # its reader is slow for longer than was thought
        self.queue.admit(self._start)
        return self.batcher.choose(self.running, may_draft=not self.waiting)

    def _start(self, sequence: Sequence, demand: Demand) -> None:
        request, layout = sequence.request, self.ledger.layout
        self.cache.allocate(sequence, demand)
        assert sequence.slot is not None
        self.running.append(sequence)
        self._unstarted.discard(request.id)
        held, most = layout.committed(len(request.prompt)), layout.committed(request.rows_max)
        first_s = self.batcher.first_token_s(sequence, self.running)
        self._events.append(Started(request.id, sequence.index, sequence.slot, held, most, sequence.cached, first_s))

    def _skip_step(self) -> bool:
        """Lets a step pass without computing anything, if all there is to do is to wait for a later one."""
        if any(sequence.held for sequence in self.running) and not self.batcher.any_ahead:
            return False  # it depends on their readers
        if not self.running and not any(s.reservation and not s.held for s in self.waiting):
            return False
        self.timeline.advance()
        return True

    def _replan_stalled(self) -> None:
        """Renews the demand of sequences stalled by the banker: this step may have been the last of it."""
        for sequence in self.batcher.stalled:
            if sequence in self.running:
                self._replan(sequence)
        self.batcher.stalled.clear()

    def _replan(self, sequence: Sequence) -> None:
        """Renews a demand from now on, with a pause where the reader is slow."""
        pause = 0
        if sequence.held:
            step_s = self.cost.predict(len(self.running)) or 0.01
            pause = min(max(1, int(self.hold_limit_s / step_s)), self.admission.HORIZON)
        self.admission.replan(sequence, force=True, pause=pause)

    def _end(self, sequence: Sequence, keep: bool = True, by_itself: bool = False) -> None:
        """Forgets a sequence. keep: whether its rows may be reused; by_itself: whether by a stop token."""
        request = sequence.request
        siblings = self._live[request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[request.id]
            self._unstarted.discard(request.id)
        self.queue.released += 1
        if sequence.slot is None:
            self.queue.remove(sequence)
            return
        self.running.remove(sequence)
        sequence.prompt_lookup = None
        keep = keep and request.cache_prefix
        self.log.ended(sequence, keep)
        self.admission.end(sequence.slot, keep, by_itself)
        self.cache.release(sequence)


def _failed(sequence: Sequence, error: Exception) -> Failed:
    blame: Blame = "request" if isinstance(error, GrammarError) else "server"
    return Failed(sequence.request.id, sequence.index, str(error), blame)
