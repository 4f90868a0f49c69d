"""The KV memory formula, what a sequence really commits of a paged pool, and the plan. Torch-free.

    kv_bytes_per_token = 2 (K and V) x num_layers x num_kv_heads x head_dim x bytes_per_element
    kv_bytes(n)        = kv_bytes_per_token x n        (layers with a sliding window: min(n, window) rows)

num_kv_heads equals num_heads for multi-head attention, 1 for multi-query, something in between for grouped-query
(Shazeer 2019, "Fast Transformer Decoding"; Ainslie et al. 2023, "GQA").
"""

from __future__ import annotations

import math
import mmap
import os
from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from tokenteller.model.config import ModelConfig

PAGE_BYTES = 4096


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Bytes of K and V that one token keeps, over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How K and V rows lie in memory. A lane is one (layer, K or V, kv head): the rows of one head, one after another.

    `paged`: memory follows the rows written, page by page. Not paged: every slot costs its full length.
    `windows`: rows that a query of each layer may look at, its own counted; empty where no layer has one.
    `chunk`: the most rows of one sequence that a step computes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    bytes_per_element: int = 4
    paged: bool = True
    windows: tuple[int | None, ...] = ()
    chunk: int = 1

    @classmethod
    def of(
        cls, config: ModelConfig, max_context: int, bytes_per_element: int = 4, paged: bool = True, chunk: int = 1
    ) -> KVLayout:
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        return cls(*shape, max_context, bytes_per_element, paged, config.windows, chunk)

    @property
    def lanes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one lane."""
        return self.head_dim * self.bytes_per_element

    @property
    def lane_bytes(self) -> int:
        """Address space of one lane, rounded up so that every lane starts on a page."""
        return self.lane_pages(self.max_context) * PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Address space of one slot."""
        return self.lanes * self.lane_bytes

    @property
    def bytes_per_token(self) -> int:
        """What a token adds, as long as no window is full."""
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.bytes_per_element)

    def kv_bytes(self, rows: int) -> int:
        """The formula: bytes of K and V in `rows` rows, of which a layer with a window keeps as many as that has."""
        per_layer = self.bytes_per_token // self.num_layers
        kept = sum(count * min(rows, window or rows) for window, count in _layers_by(self.windows, self.num_layers))
        return per_layer * kept

    def committed(self, rows: int) -> int:
        """Bytes the pool really takes for a sequence of `rows` rows, in whole pages of each lane.

        It never falls as rows grow. A lane with a window stops growing at the pages which the window and a chunk of
        new rows can touch, for while a chunk is computed, its first row still looks at the whole window before it. So
        this holds at every moment if no step computes more than `chunk` rows of one sequence, and `KVPool.make_way`
        is told of each before.
        """
        if rows <= 0:
            return 0
        if not self.paged:
            return self.slot_bytes
        pages = self.lane_pages(rows)
        if not self.windows:
            return self.lanes * pages * PAGE_BYTES
        layers = _layers_by(self.windows, self.num_layers)
        total = sum(count * min(pages, self.window_pages(window)) for window, count in layers)
        return total * 2 * self.num_kv_heads * PAGE_BYTES

    def lane_pages(self, rows: int) -> int:
        """Pages that `rows` rows from the beginning of a lane lie in."""
        return -(-rows * self.row_bytes // PAGE_BYTES)

    def window_pages(self, window: int | None) -> int:
        """The most pages that a lane ever holds: those of the window and a chunk, wherever in a page they begin."""
        whole = self.lane_pages(self.max_context)
        return whole if window is None else min(whole, self.lane_pages(window + self.chunk - 1) + 1)

    def pages_behind(self, window: int, rows: int) -> int:
        """Pages at the beginning of a lane that a sequence of `rows` rows has given back."""
        return max(0, self.lane_pages(rows) - self.window_pages(window))

    def holds(self, computed: int, rows: int) -> bool:
        """Whether a slot of `computed` rows still has all pages that a slot of its first `rows` rows would have."""
        windows = [window for window in set(self.windows) if window]
        return rows <= computed and all(self.pages_behind(w, computed) == self.pages_behind(w, rows) for w in windows)

    def rows_that_fit(self, pool_bytes: int) -> int:
        """The longest single sequence, in rows, whose committed bytes stay within `pool_bytes`."""
        return bisect_right(range(1, self.max_context + 1), pool_bytes, key=self.committed)

    def tokens_that_fit(self, pool_bytes: int) -> int:
        """The most that a prompt and its max_tokens can be together: the last token takes no row."""
        return min(self.max_context, self.rows_that_fit(pool_bytes) + 1)


@cache
def _layers_by(windows: tuple[int | None, ...], num_layers: int) -> tuple[tuple[int | None, int], ...]:
    """(window, how many layers have it)."""
    return tuple(Counter(windows or (None,) * num_layers).items())


def rows_max(prompt_tokens: int, max_tokens: int) -> int:
    """Rows a sequence can ever need: the last sampled token is never fed back."""
    return prompt_tokens + max_tokens - 1


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the plan: sequences of `tokens` tokens, what one commits, how many fit at once."""

    tokens: int
    bytes_each: int
    fit_in_bytes: int
    fit: int


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What the formula allows, all in bytes and tokens."""

    weight_bytes: int
    bytes_per_token: int
    bytes_per_element: int
    max_context: int
    slots: int
    pool_bytes: int
    sequence_bytes: int
    paged: bool
    windowed_layers: int
    window: int | None
    fits: bool
    table: tuple[PlanRow, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(layout: KVLayout, *, slots: int, pool_bytes: int, weight_bytes: int, by_memory: bool = False) -> KVPlan:
    """What fits: a table of sequence length against how many run at once, and advice when one full sequence does not.

    pool_bytes: what is left for K and V after the weights; slots: how many sequences may run at once at all; by_memory:
    what was given is the memory for both.
    """
    fits_rows = layout.rows_that_fit(pool_bytes)
    rows = []
    for tokens in _lengths(layout.max_context):
        each = layout.committed(tokens)
        fit_in_bytes = pool_bytes // each
        rows.append(PlanRow(tokens, each, fit_in_bytes, min(slots, fit_in_bytes)))
    return KVPlan(
        weight_bytes=weight_bytes,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_element=layout.bytes_per_element,
        max_context=layout.max_context,
        slots=slots,
        pool_bytes=pool_bytes,
        sequence_bytes=layout.committed(layout.max_context),
        paged=layout.paged,
        windowed_layers=sum(window is not None for window in layout.windows),
        window=max((window for window in layout.windows if window), default=None),
        fits=fits_rows >= layout.max_context,
        table=tuple(rows),
        advice=_advice(layout, pool_bytes, fits_rows, weight_bytes if by_memory else None),
    )


def _lengths(max_context: int) -> list[int]:
    """Powers of two from 128 up, and the full context."""
    return sorted({min(2**power, max_context) for power in range(7, max_context.bit_length() + 1)})


def _advice(layout: KVLayout, pool_bytes: int, fits_rows: int, beside: int | None) -> tuple[str, ...]:
    """`beside`: bytes of the weights, where the memory for both was given."""
    needed = layout.committed(layout.max_context)
    if fits_rows >= layout.max_context:
        return ()
    says = [
        f"one sequence of {layout.max_context:,} tokens needs {size(needed)} of K/V, the pool has {size(pool_bytes)}"
    ]
    if fits_rows:
        says.append(f"the longest sequence that fits has {fits_rows:,} tokens (--max-context {fits_rows})")
    heads = layout.num_kv_heads * pool_bytes // needed
    if 1 <= heads < layout.num_kv_heads:
        says.append(f"a model with {heads} kv heads in place of {layout.num_kv_heads} would fit")
    flag = f"--kv-memory {in_mib(needed)}" if beside is None else f"--memory {in_mib(beside + needed)}"
    says.append(f"or give the pool {size(needed)} ({flag})")
    return tuple(says)


def in_mib(count: int) -> str:
    """Bytes as a flag takes them, rounded up."""
    return f"{math.ceil(count / 2**20)}MiB"


def size(count: int) -> str:
    """1536 -> '1.5 KiB'; exact enough to read, bytes stay in the JSON."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def can_page() -> bool:
    """Whether the pool can be one lazily filled mapping here: Linux with 4 KiB pages."""
    return os.path.exists("/proc/self/smaps") and hasattr(mmap, "MADV_DONTNEED") and mmap.PAGESIZE == PAGE_BYTES
