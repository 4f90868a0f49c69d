"""The scheduler: plan a step, commit its tokens, cancel. Continuous batching in pure Python, torch-free."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from tokenteller.model.grammar import GrammarError
from tokenteller.model.sampler import Sampled
from tokenteller.server.engine.cost import StepCost
from tokenteller.server.engine.explain import Decisions
from tokenteller.server.engine.guess import Guesser
from tokenteller.server.engine.ledger import KVLedger
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

AGEING_S = 10.0  # a request of the next lower priority is overtaken for so long, and no longer
STRETCH = 0.5  # of a step's own time that each prompt may make it longer, if no gap is wished,
MOST_PROMPTS = 8  # up to so many
LOOK_AHEAD = 16  # so many of those that wait are tried when something has come free
MARGIN = 1.2  # by which a guess has to be worth more than its row costs
WORTH_GUESSING_S = 150e-6  # of a step, for each token: for less, looking it up takes longer than it brings
SLACK = 2.0  # times what steps cost lately may they cost, before a time that was told is passed
WORTH_COPYING = 16  # rows of a common prefix below which computing them is as good


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    admitted: int = 0
    bypasses: int = 0  # times that one from behind was let in before its turn
    held_steps: int = 0  # steps that a sequence had to sit out for the sake of a safe state, or of what was promised
    postponed: int = 0  # starts that could not be at the step booked for them
    expired: int = 0
    prefix_hits: int = 0
    prefix_rows: int = 0  # rows that did not have to be computed
    guessed: int = 0
    accepted: int = 0  # guessed tokens that came


class Scheduler:
    """Sequences join and leave at every step; nothing admitted is ever preempted.

    A step takes one row of every sequence that decodes, and beside them rows of prompts: those that the timetable has
    for them in this step, and as many more, first come first served, as `prefill_chunk` and the wished token gap allow.
    """

    def __init__(
        self,
        ledger: KVLedger,
        prefill_chunk: int,
        *,
        token_gap_s: float | None = None,
        bypass_limit: int = 4,
        hold_limit_s: float = 30.0,
        decisions: Decisions | None = None,
        speculate: int = 0,
    ) -> None:
        self.ledger = ledger
        self.prefill_chunk = prefill_chunk
        self.token_gap_s = token_gap_s
        self.bypass_limit = bypass_limit
        self.hold_limit_s = hold_limit_s
        self.decisions = decisions
        # where a window slides, a wrong guess would make pages seem behind it that are not
        self.speculate = 0 if any(ledger.layout.windows) else speculate
        self.waiting: list[Sequence] = []  # in their order
        self.running: list[Sequence] = []  # in the order of admission
        self.resident: dict[int, Sequence] = {}  # ended, but their rows are still there
        self.cost = StepCost()
        self.counts = Counts()
        self._by_id: dict[str, list[Sequence]] = {}
        self._moves: list[Release | Copy] = []
        self._events: list[Event] = []
        self._sat_out: list[Sequence] = []
        self._ahead = False  # whether some wait for their plan to catch up with them
        self.held: set[str] = set()  # requests whose readers are slow
        self._timers: list[tuple[float, int, Sequence, bool]] = []  # a heap; True: only while it waits
        self._serial = count()
        self._began: float | None = None  # when the step under way did: as the last one ended, unless there was a pause
        self._freed = 0  # how often something has come free: worth another try for those that wait
        self._tried = 0  # for which of these they were tried
        self._due = 0  # the first step for which a start is booked

    # The verbs

    def submit(self, request: Request, now: float) -> None:
        """Puts the request's choices in the queue and books their starts. now: seconds of the engine's clock."""
        sequences = [Sequence(request, index) for index in range(request.n)]
        self._by_id[request.id] = sequences.copy()
        for sequence in sequences:
            serial = next(self._serial)
            sequence.order = (now + AGEING_S * request.priority, serial)
            insort(self.waiting, sequence, key=lambda s: s.order)
            self._book(self.waiting.index(sequence))
            if self.decisions:
                self.decisions.booked(sequence)
            for time, only_waiting in ((request.deadline, False), (request.start_by, True)):
                if time is not None:
                    heapq.heappush(self._timers, (time, serial, sequence, only_waiting))
        self._tried = -1

    def plan(self, now: float) -> Step:
        """Lets in who may come in, and chooses what the next step computes."""
        if self._began is None:
            self._began = now
        self._expire(now)
        if self.held:
            self._extend_holds()
        for sequence in self.running:  # before those who start take the slot of one that has just ended
            if sequence.source is not None and self._follow(sequence):
                self._events.append(Reused(sequence.request.id, sequence.index, sequence.cached))
        self._admit()
        spans = self._choose()
        while not spans and self._idle_until_due():
            self._put_right()  # or the plan of one that may not grow would be over before it is
            if self.held:
                self._extend_holds()
            self._admit()
            spans = self._choose()
        events, self._events = tuple(self._events), []
        return Step(self.take_moves(), tuple(spans), events)

    def take_moves(self) -> tuple[Release | Copy, ...]:
        """What is to be done in the pool before anything is computed; each is told once."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def commit(self, step: Step, outcomes: Seq[Sampled | Exception], now: float) -> list[Event]:
        """Books what a step computed. An outcome is a token, or what went wrong: in order, one of each span that
        samples, and after it one of each of its guesses.
        """
        began, self._began = self._began, now if step.spans else None
        if not step.spans:
            self._put_right()
            return []
        assert began is not None
        self.cost.observe(step.rows, now - began)
        self.ledger.timetable.tick()
        events: list[Event] = []
        spans: Seq[Span] = step.spans
        if len(outcomes) > len(spans):  # some were guesses
            spans, outcomes = self._accepted(spans, outcomes)
        results = iter(outcomes)
        for span in spans:  # this runs for every token
            sequence, stop = span.sequence, span.stop
            account, tokens = sequence.account, sequence.tokens
            assert account is not None and sequence.slot is not None
            sequence.computed = stop
            if stop <= account.room:
                account.rows = stop
            else:
                self.ledger.grow(sequence.slot, stop)
            if stop < len(tokens):
                continue
            outcome, request = next(results), sequence.request
            if isinstance(outcome, Exception):
                self._drop(sequence, keep=False)
                blame: Blame = "request" if isinstance(outcome, GrammarError) else "server"
                events.append(Failed(request.id, sequence.index, str(outcome), blame))
                continue
            token_id = outcome.token_id
            tokens.append(token_id)
            events.append(Token(request.id, sequence.index, token_id, outcome.logprobs))
            if token_id in request.stop_ids:  # an end token is an end even where it is also the last token allowed
                self._drop(sequence, by_itself=True)
                events.append(Finished(request.id, sequence.index, "stop"))
            elif len(tokens) == sequence.longest:
                self._drop(sequence)
                events.append(Finished(request.id, sequence.index, "length"))
            elif sequence.paced == NEVER:
                self._replan(sequence, force=False)  # its prompt may have been computed earlier than planned
        self._put_right()
        return events

    def _put_right(self) -> None:
        """Plans those anew who sat out the step; it may have been the last for some."""
        for sequence in self._sat_out:
            if sequence in self.running:
                self._replan(sequence, force=True)
        self._sat_out.clear()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Forgets a request, or one choice of it, wherever it is; its slots and bytes are free for the next plan.

        An id that is unknown, or has ended, is ignored.
        """
        for sequence in self.sequences(request_id):
            if index is None or sequence.index == index:
                self._drop(sequence)

    def hold(self, request_id: str, held: bool) -> None:
        """Lets a request sit out until its reader has caught up; it is planned with its maximum meanwhile."""
        sequences = self.sequences(request_id)
        (self.held.add if held and sequences else self.held.discard)(request_id)
        for sequence in sequences:
            if sequence.slot is not None and sequence.held != held:
                sequence.held = held
                self._replan(sequence, force=True)
                self._freed += 1

    # Waiting

    def latest_s(self, sequence: Sequence) -> float | None:
        """Seconds after which a waiting sequence has its slot at the latest; None when it is too far to tell.

        The step is certain, what steps cost is not: they took up to 1.6 times as long while hundreds connected.
        """
        return None if sequence.plan is None else self.within_s(sequence.plan.begin)

    def next_start_s(self) -> float:
        """Seconds after which the next one waiting has its slot at the latest; 0 when nobody waits."""
        return self.within_s(self._due) if self.waiting else 0.0

    def within_s(self, step: int) -> float:
        """Seconds after which `step` begins at the latest."""
        return SLACK * self.seconds_until(step)

    def seconds_until(self, step: int) -> float:
        """What the steps before `step` cost lately, with all the rows planned for them."""
        timetable = self.ledger.timetable
        steps = max(0, step - timetable.now)
        rows = int(timetable.ahead(timetable.now, steps)[1:].sum())
        return steps * self.cost.base + rows * self.cost.slope

    def next_expiry(self) -> float | None:
        """When plan() has something to do even if nothing else happens."""
        return self._timers[0][0] if self._timers else None

    def check(self) -> None:
        """Proves that the books agree with each other; for tests and for idle moments."""
        ledger, table = self.ledger, self.ledger.timetable
        ledger.check()
        assert {s.slot: s.account for s in self.running} == ledger.accounts
        assert {slot: s.computed for slot, s in self.resident.items()} == ledger.resident
        for s in self.running:
            assert s.account and s.computed == s.account.rows
            assert s.paced == (s.account.plan.ready + 1 if s.generated and not s.held else NEVER)
            assert s.held or s.account.plan.end >= table.now, "nobody outlives its plan"
        assert self.waiting == sorted(self.waiting, key=lambda s: s.order)
        plans = [account.plan for account in ledger.accounts.values()] + [s.plan for s in self.waiting if s.plan]
        last = max((plan.end for plan in plans), default=table.now)
        sums = table.ahead(table.now, last + 100 - table.now).copy()
        for plan in plans:
            take = plan.take[:, max(0, table.now - plan.begin) :]
            at = max(plan.begin, table.now) - table.now
            sums[:, at : at + take.shape[1]] -= take
        assert not sums.any(), "the timetable is the sum of all plans"

    def sequences(self, request_id: str) -> list[Sequence]:
        return list(self._by_id.get(request_id, ()))

    def _book(self, at: int) -> None:
        """Books a start for the one at place `at` of the queue: not before the one ahead of it."""
        sequence, earliest = self.waiting[at], self.ledger.timetable.now
        if at:
            ahead = self.waiting[at - 1].plan
            if ahead is None:
                return
            earliest = max(earliest, ahead.begin)
        request = sequence.request
        sequence.plan = self.ledger.book(len(request.prompt), request.rows_max, earliest)
        if sequence.plan:
            self._due = min(self._due, sequence.plan.begin)

    def _expire(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            sequence, only_waiting = heapq.heappop(self._timers)[2:]
            siblings = self._by_id.get(sequence.request.id, [])
            if sequence not in siblings or (only_waiting and any(s.slot is not None for s in siblings)):
                continue
            self._events.append(Finished(sequence.request.id, sequence.index, "deadline"))
            self.counts.expired += 1
            self._drop(sequence)

    def _extend_holds(self) -> None:
        """Plans those anew whose readers are slow for longer than was thought."""
        for sequence in self.running:
            if sequence.held and sequence.account and sequence.account.plan.end <= self.ledger.timetable.now:
                self._replan(sequence, force=True)

    def _admit(self) -> None:
        """Starts whose time has come, and before their time those that delay nobody, in the order of the queue.

        One that is passed over may be passed `bypass_limit` times; then all behind it wait for their own time.
        """
        clock = self.ledger.timetable.now
        if not self.waiting or (self._tried == self._freed and clock < self._due):
            return
        self._tried = self._freed
        passed: list[Sequence] = []
        closed = False
        for sequence in self.waiting.copy():
            due = sequence.plan is not None and sequence.plan.begin <= clock
            if (closed and not due) or sequence.request.id in self.held:
                continue
            if (due or sequence.tried != self._freed) and self._start(sequence):
                if self.decisions:
                    self.decisions.started(sequence, due, len(passed))
                if not due:
                    self.counts.bypasses += bool(passed)
                    for other in passed:
                        other.passed += 1
                        closed |= other.passed >= self.bypass_limit
                continue
            sequence.tried = self._freed
            if due:
                self._postpone(sequence)
            passed.append(sequence)
            closed |= sequence.passed >= self.bypass_limit or len(passed) >= LOOK_AHEAD
        for at, sequence in enumerate(self.waiting):
            if sequence.plan is None:  # when it came, its start was too far to be told
                self._book(at)
                if sequence.plan is None:
                    break
        self._due = min((s.plan.begin for s in self.waiting if s.plan), default=clock + self.ledger.HORIZON)

    def _idle_until_due(self) -> bool:
        """Lets a step pass in which nothing is computed, when all that is there waits for its time to come."""
        if any(sequence.held for sequence in self.running) and not self._ahead:
            return False  # their readers decide how it goes on
        if not self.running and not any(s.plan and s.request.id not in self.held for s in self.waiting):
            return False
        self.ledger.timetable.tick()
        return True

    def _postpone(self, sequence: Sequence) -> None:
        """Books anew what could not start when it was due: someone has fallen behind the plan."""
        self.counts.postponed += 1
        if sequence.plan:
            self.ledger.timetable.remove(sequence.plan)
        request = sequence.request
        sequence.plan = self.ledger.book(len(request.prompt), request.rows_max, self.ledger.timetable.now + 1)

    def _start(self, sequence: Sequence) -> bool:
        """Gives one that waits its slot, with what there is of its prompt already; False when it must wait."""
        request, ledger = sequence.request, self.ledger
        prompt = len(request.prompt)
        plan = ledger.start(prompt, request.rows_max, sequence.plan)
        if plan is None:
            return False
        self.waiting.remove(sequence)
        sequence.plan = None
        source, shared = self._source(sequence)
        adopted = None
        if source and source.slot in ledger.resident:
            if shared == source.computed or not ledger.can_keep(source.slot, prompt):
                adopted = source.slot
            else:
                ledger.touch(source.slot)
        sequence.slot, given_up = ledger.open(request.id, prompt, request.rows_max, plan, adopted)
        sequence.account = ledger.accounts[sequence.slot]
        self.running.append(sequence)
        self.counts.admitted += 1
        self._give_up(given_up)
        if source and adopted is not None:
            del self.resident[adopted]
            source.slot = None
            if shared < source.computed:
                self._moves.append(Release(adopted, keep=shared))
            self._reuse(sequence, shared, adopted)
        elif source:
            sequence.source, sequence.shared = source, shared
            self._follow(sequence)
        layout = ledger.layout
        held, most = layout.committed(prompt), layout.committed(request.rows_max)
        cached, first_s = sequence.cached, self._first_token_s(sequence)
        self._events.append(Started(request.id, sequence.index, sequence.slot, held, most, cached, first_s))
        return True

    def _first_token_s(self, sequence: Sequence) -> float:
        """What it will take, as it seems, until the prompt is computed: those before it come first."""
        rows = sum(max(0, len(s.request.prompt) - s.computed) for s in self.running if s.source is None)
        rows += sequence.source is not None
        decoding = sum(s.computed >= len(s.request.prompt) for s in self.running)
        steps = -(-rows // max(1, self._prefill_budget(decoding, len(self.running) - decoding)))
        return steps * self.cost.predict(decoding) + rows * self.cost.slope

    # Running

    def _choose(self) -> list[Span]:
        clock = self.ledger.timetable.now
        spans: list[Span] = []
        prompts: list[Sequence] = []
        growing: list[int] = []
        self._ahead = False
        for sequence in self.running:  # this runs for every token
            computed, account = sequence.computed, sequence.account
            assert account is not None and sequence.slot is not None
            if sequence.paced > clock:
                if sequence.held:
                    continue
                if sequence.paced == NEVER:
                    if computed + 1 < len(sequence.tokens):
                        prompts.append(sequence)
                    else:  # one row is not worth a wait
                        spans.append(Span(sequence, computed, computed + 1))
                    continue
                if not self._replan(sequence, force=False):
                    self._wait_for_plan(sequence)
                    continue
            if computed == account.room:
                if self.ledger.ahead(sequence.slot) and not self._replan(sequence, force=False):
                    self._wait_for_plan(sequence)
                    continue
                growing.append(sequence.slot)
            spans.append(Span(sequence, computed, computed + 1))
        if growing:
            spans = self._grow(spans, growing)
        if self.speculate and spans and not prompts and not self.waiting:
            self._guess(spans)
        return spans + self._prefill(prompts, len(spans))

    def _wait_for_plan(self, sequence: Sequence) -> None:
        self._sit_out(sequence, "ahead of its plan; what it would take was promised to others")
        self._ahead = True

    def _guess(self, spans: list[Span]) -> None:
        """Adds guesses to the spans of those that decode, where they are expected to pay.

        They take nothing that was promised: they lie in pages that the row before them takes anyway, and none are
        made while anybody waits, so that no step is longer than was told. If they are right, the sequence is ahead of
        its plan; before its next page it is planned anew, or else it waits for its plan to catch up.
        """
        cost, count = self.cost, len(spans)
        step = cost.predict(count)
        # what a row costs, in tokens; while nobody knows, few guesses find out
        price = MARGIN * cost.slope * count / step if cost.slope else 0.5
        if price >= 1.0 or step < count * WORTH_GUESSING_S:
            return
        for span in spans:
            sequence = span.sequence
            assert sequence.slot is not None
            if sequence.matcher or sequence.computed < len(sequence.request.prompt):
                continue
            most = min(self.speculate, self.ledger.rows_for_nothing(sequence.slot))
            if most:
                guesser = sequence.guesser = sequence.guesser or Guesser()
                span.guesses = guesser.guess(sequence.tokens, price, most)
                span.stop += len(span.guesses)

    def _accepted(
        self, spans: Seq[Span], outcomes: Seq[Sampled | Exception]
    ) -> tuple[Seq[Span], Seq[Sampled | Exception]]:
        """Spans and outcomes as if each token had come in a step of its own: up to the first not guessed, or an end."""
        one_by_one: list[Span] = []
        came: list[Sampled | Exception] = []
        at = 0
        for span in spans:
            sequence, guesses = span.sequence, span.guesses
            known, right = span.stop - len(guesses), 0
            for guess, outcome in zip(guesses, outcomes[at:], strict=False):
                if isinstance(outcome, Exception) or outcome.token_id != guess or guess in sequence.request.stop_ids:
                    break
                right += 1
            one_by_one += [Span(sequence, stop - 1, stop) for stop in range(known, known + right + 1)]
            came += outcomes[at : at + right + 1]
            at += len(guesses) + 1
            if guesses and sequence.guesser:
                sequence.guesser.learn(right, right < len(guesses))
                self.counts.guessed += len(guesses)
                self.counts.accepted += right
        return one_by_one, came

    def _grow(self, spans: list[Span], growing: list[int]) -> list[Span]:
        """Makes room for those that take a new page; lets sit out those that would leave no safe order."""
        refused = self.ledger.must_wait(growing)
        if refused:
            self._sat_out = [span.sequence for span in spans if span.sequence.slot in refused]
            for sequence in self._sat_out:
                self._sit_out(sequence, "its next page would leave no order in which all can end")
            spans = [span for span in spans if span.sequence.slot not in refused]
        self._give_up(self.ledger.make_room(sum(map(self.ledger.growth, set(growing) - refused))))
        return spans

    def _sit_out(self, sequence: Sequence, why: str) -> None:
        self.counts.held_steps += 1
        if self.decisions:
            self.decisions.sits_out(sequence, why)

    def _prefill(self, prompts: list[Sequence], decoding: int) -> list[Span]:
        """Rows of prompts: first those that the timetable has for this step, then first come first served."""
        clock = self.ledger.timetable.now
        sure = []
        for sequence in prompts:
            account = sequence.account
            assert account is not None
            if account.plan.ready < clock:
                self._replan(sequence, force=True)  # it is behind its plan
            left = len(sequence.tokens) - sequence.computed
            sure.append(min(left, account.plan.prompt_rows(clock)))
        spare = self._prefill_budget(decoding, len(prompts)) - sum(sure)
        spans = []
        for sequence, rows in zip(prompts, sure, strict=True):
            if sequence.source is None:  # who is to copy computes only what it has to: its source may fail it
                more = min(max(0, spare), len(sequence.tokens) - sequence.computed - rows)
                rows, spare = rows + more, spare - more
            if rows:
                spans.append(Span(sequence, sequence.computed, sequence.computed + rows))
        return spans

    def _prefill_budget(self, decoding: int, prompts: int) -> int:
        """Prompt rows for this step, so that those that decode keep their pace: a wished gap, or half a step a prompt.

        Never fewer than what the timetable counts on, nor more than `prefill_chunk`.
        """
        if not decoding:
            return self.prefill_chunk
        gap = self.token_gap_s or (1 + STRETCH * min(prompts, MOST_PROMPTS)) * self.cost.predict(decoding)
        rows = self.cost.rows_within(gap, self.prefill_chunk + decoding) - decoding
        return max(rows, self.ledger.sure_rows)

    def _replan(self, sequence: Sequence, force: bool) -> bool:
        """Puts a running sequence's plan right: from here on it goes on, or stands still while its reader is slow."""
        account = sequence.account
        assert account is not None and sequence.slot is not None
        still = 0
        if sequence.held:
            step = self.cost.predict(len(self.running)) or 0.01
            still = min(max(1, int(self.hold_limit_s / step)), self.ledger.HORIZON)
        left = max(0, len(sequence.request.prompt) - sequence.computed)
        fits = self.ledger.replan(sequence.slot, left, force, still)
        sequence.paced = account.plan.ready + 1 if sequence.generated and not sequence.held else NEVER
        return fits

    def _drop(self, sequence: Sequence, keep: bool = True, by_itself: bool = False) -> None:
        siblings = self._by_id[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_id[sequence.request.id]
            self.held.discard(sequence.request.id)
            if len(self._timers) > 32 * len(self._by_id):  # a request has 16 at most: the others are of ended ones
                self._timers = [timer for timer in self._timers if timer[2] in self._by_id.get(timer[2].request.id, ())]
                heapq.heapify(self._timers)
        self._freed += 1
        if sequence.slot is None:
            self.waiting.remove(sequence)
            if sequence.plan:
                self.ledger.timetable.remove(sequence.plan)
            return
        self.running.remove(sequence)
        sequence.guesser = None
        keep = keep and sequence.request.cache_prefix
        if self.decisions:
            lent = self.ledger.layout.committed(self.ledger.accounts[sequence.slot].lent)
            self.decisions.ended(sequence, lent, keep)
        self.ledger.close(sequence.slot, keep, by_itself)
        sequence.account = None
        if sequence.slot in self.ledger.resident:
            self.resident[sequence.slot] = sequence
        else:
            self._moves.append(Release(sequence.slot))
            sequence.slot = None

    # Reuse of prefixes

    def _source(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """Who has, or is just computing, the longest beginning of the sequence's prompt, and how many rows of it.

        The last row of a prompt is always computed: the first token comes out of it.
        """
        best, most = None, WORTH_COPYING - 1
        if sequence.request.cache_prefix:
            salt, tokens, holds = sequence.request.cache_salt, sequence.tokens, self.ledger.layout.holds
            for other in (*self.running, *self.resident.values()):
                if other.request.cache_prefix and other.request.cache_salt == salt:
                    known = other.computed if other.slot in self.resident else len(other.request.prompt)
                    known = max(known, other.computed)
                    rows = common_prefix(tokens, other.tokens, min(len(tokens) - 1, known))
                    if rows > most and holds(max(rows, other.computed), rows):
                        best, most = other, rows
        return best, most if best else 0

    def _follow(self, sequence: Sequence) -> bool:
        """Copies the shared rows once their source has computed them, or as many as there are when it stops."""
        source = sequence.source
        assert source is not None and sequence.slot is not None
        if source.slot in self.ledger.accounts and not source.held and source.computed < sequence.shared:
            return False
        sequence.source = None
        rows = min(sequence.shared, source.computed)
        if source.slot is None or rows <= sequence.computed or not self.ledger.layout.holds(source.computed, rows):
            return False
        self._moves.append(Copy(source.slot, sequence.slot, rows))
        self._reuse(sequence, rows, source.slot)
        return True

    def _reuse(self, sequence: Sequence, rows: int, source: int) -> None:
        assert sequence.slot is not None
        sequence.cached = rows - sequence.computed
        sequence.computed = rows
        self.ledger.grow(sequence.slot, rows)
        self.counts.prefix_hits += 1
        self.counts.prefix_rows += sequence.cached
        if self.decisions:
            self.decisions.reused(sequence, rows, source, copied=source != sequence.slot)

    def _give_up(self, slots: list[int]) -> None:
        """Forgets the rows of resident slots whose seat or bytes are wanted."""
        for slot in slots:
            gone = self.resident.pop(slot)
            gone.slot = None
            self._moves.append(Release(slot))
            if self.decisions:
                self.decisions.given_up(slot, gone.computed)


def common_prefix(one: list[int], other: list[int], limit: int) -> int:
    """How many tokens two lists have in common at their beginning, at most `limit`."""
    low, high = 0, min(len(one), len(other), limit)
    if one[:16] != other[:16]:
        high = min(high, 16)
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
