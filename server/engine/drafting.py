"""Drafter: adds draft tokens to a step where they pay, and sorts out which were right. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenteller.model.sampler import Sampled
from tokenteller.server.engine.decision_log import Counts
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.engine.prompt_lookup import PromptLookup
from tokenteller.server.engine.sequence import Span
from tokenteller.server.engine.step_cost import StepCost

MARGIN = 1.2  # a draft token must be worth this many times what its row costs
MIN_STEP_S = 150e-6  # per sequence; in faster steps the lookup costs more than it gains


class Drafter:
    """Adds at most `most` draft tokens to each span.

    They take nothing that is reserved. They fit in the pages that the row before them takes anyway, and none are made
    while anyone waits, so no step is longer than estimated. A sequence whose draft was right is ahead of its demand.
    Before its next page it is replanned, or stalls until its demand has caught up.
    """

    def __init__(self, ledger: KVLedger, cost: StepCost, counts: Counts, most: int) -> None:
        self.ledger = ledger
        self.cost = cost
        self.counts = counts
        # behind a sliding window, rows of a wrong draft would count as if they had pushed pages out of it
        self.most = 0 if any(ledger.layout.windows) else most

    def draft(self, spans: list[Span]) -> None:
        """Adds draft tokens to the spans of sequences that decode, where they are expected to pay."""
        cost, count = self.cost, len(spans)
        step = cost.predict(count)
        # of a row, in tokens; while it is unknown, short drafts find out
        price = MARGIN * cost.slope * count / step if cost.slope else 0.5
        if price >= 1.0 or step < count * MIN_STEP_S:
            return
        for span in spans:
            sequence = span.sequence
            assert sequence.slot is not None
            if sequence.matcher or sequence.computed < len(sequence.request.prompt):
                continue
            most = min(self.most, self.ledger.rows_after_next(sequence.slot))
            if most:
                lookup = sequence.prompt_lookup = sequence.prompt_lookup or PromptLookup()
                span.draft = lookup.draft(sequence.tokens, price, most)
                span.stop += len(span.draft)

    def accept(
        self, spans: Seq[Span], outcomes: Seq[Sampled | Exception]
    ) -> tuple[Seq[Span], Seq[Sampled | Exception]]:
        """Spans and outcomes as if each token had come in a step of its own: up to the first wrong draft or an end."""
        single: list[Span] = []
        accepted: list[Sampled | Exception] = []
        at = 0
        for span in spans:
            sequence, draft = span.sequence, span.draft
            known, right = span.stop - len(draft), 0
            for token, outcome in zip(draft, outcomes[at:], strict=False):
                if isinstance(outcome, Exception) or outcome.token_id != token or token in sequence.request.stop_ids:
                    break
                right += 1
            single += [Span(sequence, stop - 1, stop) for stop in range(known, known + right + 1)]
            accepted += outcomes[at : at + right + 1]
            at += len(draft) + 1
            if draft and sequence.prompt_lookup:
                sequence.prompt_lookup.learn(right, int(right < len(draft)))
                self.counts.drafted += len(draft)
                self.counts.accepted += right
        return single, accepted
