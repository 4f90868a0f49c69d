"""Batcher: which rows the next step computes. Torch-free.

One row of every sequence that decodes, unless it stalls; beside them prompt rows: those that the timeline has for each
prompt in this step, and as many more, first come first served, as `prefill_chunk` and the token gap allow.
"""

from __future__ import annotations

from tokenteller.server.engine.admission import Admission
from tokenteller.server.engine.decision_log import DecisionLog
from tokenteller.server.engine.drafting import Drafter
from tokenteller.server.engine.prefix_cache import PrefixCache
from tokenteller.server.engine.sequence import NEVER, Sequence, Span
from tokenteller.server.engine.step_cost import StepCost

STRETCH = 0.5  # without a target token gap, each prompt may make a step this much longer,
MAX_STRETCHES = 8  # up to this many prompts


class Batcher:
    def __init__(
        self,
        admission: Admission,
        cache: PrefixCache,
        drafter: Drafter,
        cost: StepCost,
        log: DecisionLog,
        prefill_chunk: int,
        token_gap_s: float | None,
    ) -> None:
        self.admission = admission
        self.ledger = admission.ledger
        self.cache = cache
        self.drafter = drafter
        self.cost = cost
        self.log = log
        self.prefill_chunk = prefill_chunk
        self.token_gap_s = token_gap_s
        self.stalled: list[Sequence] = []  # by the banker in this step; their demand has to be renewed after it
        self.any_ahead = False  # whether any stalls in this step until its demand has caught up with it

    def choose(self, running: list[Sequence], may_draft: bool) -> list[Span]:
        """The spans of the next step."""
        now = self.admission.timeline.now
        spans: list[Span] = []
        prompts: list[Sequence] = []
        growing: list[int] = []
        self.any_ahead = False
        for sequence in running:  # this runs for every token
            computed, allocation = sequence.computed, sequence.allocation
            assert allocation is not None and sequence.slot is not None
            if sequence.decodes_from > now:
                if sequence.held:
                    continue
                if sequence.decodes_from == NEVER:
                    if computed + 1 < len(sequence.tokens):
                        prompts.append(sequence)
                    else:  # one row is not worth a wait
                        spans.append(Span(sequence, computed, computed + 1))
                    continue
                if not self.admission.replan(sequence):
                    self._stall_ahead(sequence)
                    continue
            if computed == allocation.capacity:
                if self.admission.ahead_of_demand(sequence.slot) and not self.admission.replan(sequence):
                    self._stall_ahead(sequence)
                    continue
                growing.append(sequence.slot)
            spans.append(Span(sequence, computed, computed + 1))
        if growing:
            spans = self._grow(spans, growing)
        if may_draft and self.drafter.most and spans and not prompts:
            self.drafter.draft(spans)
        return spans + self._prefill(prompts, len(spans))

    def first_token_s(self, sequence: Sequence, running: list[Sequence]) -> float:
        """Estimate of the time until a sequence's prompt is computed, after those before it."""
        rows = sum(max(0, len(s.request.prompt) - s.computed) for s in running if s.source is None)
        rows += sequence.source is not None
        decoding = sum(s.computed >= len(s.request.prompt) for s in running)
        steps = -(-rows // max(1, self.prefill_budget(decoding, len(running) - decoding)))
        return steps * self.cost.predict(decoding) + rows * self.cost.slope

    def prefill_budget(self, decoding: int, prompts: int) -> int:
        """Prompt rows for a step that leave those that decode their pace: the target gap, or half a step per prompt.

        Never fewer than the timeline counts on, nor more than `prefill_chunk`.
        """
        if not decoding:
            return self.prefill_chunk
        gap = self.token_gap_s or (1 + STRETCH * min(prompts, MAX_STRETCHES)) * self.cost.predict(decoding)
        rows = self.cost.rows_within(gap, self.prefill_chunk + decoding) - decoding
        return max(rows, self.admission.sure_rows)

    def _grow(self, spans: list[Span], growing: list[int]) -> list[Span]:
        """Makes room for those that take a new page, and stalls those whose growth would leave no safe order."""
        refused = self.admission.stalled(growing)
        if refused:
            self.stalled = [span.sequence for span in spans if span.sequence.slot in refused]
            for sequence in self.stalled:
                self.log.stalled(sequence, "with its next page no order would let all finish")
            spans = [span for span in spans if span.sequence.slot not in refused]
        self.cache.evict(sum(map(self.ledger.next_row_bytes, set(growing) - refused)))
        return spans

    def _stall_ahead(self, sequence: Sequence) -> None:
        self.log.stalled(sequence, "ahead of its demand; the bytes of its next page are reserved")
        self.any_ahead = True

    def _prefill(self, prompts: list[Sequence], decoding: int) -> list[Span]:
        """Prompt rows: first those that the timeline has for this step, then first come first served."""
        now = self.admission.timeline.now
        sure = []
        for sequence in prompts:
            assert sequence.allocation is not None
            if sequence.allocation.demand.ready < now:  # it has fallen behind
                self.admission.replan(sequence, force=True)
            left = len(sequence.tokens) - sequence.computed
            sure.append(min(left, sequence.allocation.demand.prompt_rows_at(now)))
        spare = self.prefill_budget(decoding, len(prompts)) - sum(sure)
        spans = []
        for sequence, rows in zip(prompts, sure, strict=True):
            if sequence.source is None:  # one that waits for a copy computes only what it must, as its source may fail
                more = min(max(0, spare), len(sequence.tokens) - sequence.computed - rows)
                rows, spare = rows + more, spare - more
            if rows:
                spans.append(Span(sequence, sequence.computed, sequence.computed + rows))
        return spans
