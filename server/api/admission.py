"""What is refused before a request reaches the engine: what can never fit, and what the queue has no room for."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from tokenteller.model.kv_memory import rows_max
from tokenteller.server.api.stream import Stream
from tokenteller.server.engine.engine import Status
from tokenteller.server.engine.ledger import KVLedger
from tokenteller.server.errors import NeverFits, QueueFull


def fitting_max_tokens(ledger: KVLedger, prompt_tokens: int, asked: int | None, default: int) -> int:
    """`asked`, or the default cut to what fits. Raises NeverFits if context or pool could not hold it even alone."""
    layout = ledger.layout
    context, tokens = layout.max_context, layout.tokens_that_fit(ledger.budget_bytes)
    most = max(0, tokens - prompt_tokens)
    wanted = min(default, most) if asked is None else asked
    if 1 <= wanted <= most:
        return wanted
    wanted = max(wanted, 1)
    rows = rows_max(prompt_tokens, wanted)
    needed = replace(layout, max_context=max(rows, context)).committed(rows)
    excess = prompt_tokens - tokens + 1
    remedy = f"max_tokens can be at most {most}" if most else f"shorten the prompt by {excess} tokens"
    raise NeverFits(
        f"a prompt of {prompt_tokens} tokens with max_tokens {wanted} needs {needed} bytes of K/V memory; "
        f"the context is {context} tokens and the pool {ledger.budget_bytes} bytes: {remedy}",
        param="max_tokens" if most else "prompt",
        prompt_tokens=prompt_tokens,
        max_context=context,
        max_tokens_that_fits=most,
        needed_bytes=needed,
        pool_bytes=ledger.budget_bytes,
    )


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for a slot."""

    requests: int
    prompt_tokens: int = 2**20

    def check(self, streams: Collection[Stream], status: Status, prompt_tokens: int) -> None:
        """Raises QueueFull, with the time after which the next request leaves the queue."""
        waiting = [stream for stream in streams if stream.started is None]
        free_slots = 0 if status.waiting else status.free_slots  # for those that came since the last step
        tokens = sum(len(stream.request.prompt) for stream in waiting)
        too_many = len(waiting) - free_slots >= self.requests
        too_long = len(waiting) > free_slots and tokens + prompt_tokens > self.prompt_tokens
        if not too_many and not too_long:
            return
        retry_after_s = max(1, math.ceil(status.next_start_s))
        limit = f"{self.prompt_tokens} prompt tokens" if too_long else f"{self.requests} requests"
        raise QueueFull(
            f"{len(waiting)} requests with {tokens} prompt tokens are waiting and the queue limit is {limit}; "
            f"the next request leaves the queue within {retry_after_s} s",
            retry_after_s=retry_after_s,
            waiting=len(waiting),
            waiting_tokens=tokens,
            queue_limit=self.requests,
            queue_tokens=self.prompt_tokens,
        )
