"""How much memory K and V take: the formula, whole pages of a pool, and a plan of what fits. Torch-free.

    kv_bytes_per_token = 2 (K and V) x num_layers x num_kv_heads x head_dim x bytes_per_element
    kv_bytes(n)        = kv_bytes_per_token x n        (sliding-window layers: min(n, window) rows)

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
    """Bytes of K and V that one token adds, over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where K and V lie in memory. A row is one position's K or V of one head; a lane, all rows of one (layer, K or V,
    kv head), one after another.

    `paged`: memory is taken page by page as rows are written; otherwise every slot takes its full length.
    `windows`: how many rows each layer attends to, the current one included; empty if no layer has a sliding window.
    `chunk`: most rows of one sequence that a step computes.
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
        """Address space of one lane: whole pages, so that every lane starts on one."""
        return self.lane_pages(self.max_context) * PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        """Address space of one slot."""
        return self.lanes * self.lane_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds while no window is full."""
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.bytes_per_element)

    def kv_bytes(self, rows: int) -> int:
        """The formula: bytes of K and V of `rows` rows; a layer with a window keeps no more rows than that."""
        per_layer = self.bytes_per_token // self.num_layers
        kept = sum(count * min(rows, window or rows) for window, count in _layers_by(self.windows, self.num_layers))
        return per_layer * kept

    def committed(self, rows: int) -> int:
        """Bytes of the pool that a sequence of `rows` rows takes: whole pages of each lane. Grows with rows.

        A lane with a window stops growing at the pages that the window and one chunk can touch: while a chunk is
        computed, its first row still attends to the whole window before it. This needs steps of at most `chunk` rows
        per sequence, each after a call of `KVPool.make_way`.
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
        """Pages that the first `rows` rows of a lane lie in."""
        return -(-rows * self.row_bytes // PAGE_BYTES)

    def window_pages(self, window: int | None) -> int:
        """Most pages a lane ever holds: those of a window and a chunk, wherever in a page they start."""
        whole = self.lane_pages(self.max_context)
        return whole if window is None else min(whole, self.lane_pages(window + self.chunk - 1) + 1)

    def pages_behind(self, window: int, rows: int) -> int:
        """Pages at the start of a lane that a sequence of `rows` rows has released."""
        return max(0, self.lane_pages(rows) - self.window_pages(window))

    def holds(self, computed: int, rows: int) -> bool:
        """Whether a slot of `computed` rows still has every page that its first `rows` rows need alone."""
        windows = [window for window in set(self.windows) if window]
        return rows <= computed and all(self.pages_behind(w, computed) == self.pages_behind(w, rows) for w in windows)

    def rows_that_fit(self, pool_bytes: int) -> int:
        """Rows of the longest sequence that fits in `pool_bytes`."""
        return bisect_right(range(1, self.max_context + 1), pool_bytes, key=self.committed)

    def tokens_that_fit(self, pool_bytes: int) -> int:
        """Most tokens that a prompt and its max_tokens can be together; the last one takes no row."""
        return min(self.max_context, self.rows_that_fit(pool_bytes) + 1)


@cache
def _layers_by(windows: tuple[int | None, ...], num_layers: int) -> tuple[tuple[int | None, int], ...]:
    """(window, number of layers that have it)."""
    return tuple(Counter(windows or (None,) * num_layers).items())


def rows_max(prompt_tokens: int, max_tokens: int) -> int:
    """Rows a sequence can need at most: the last sampled token is never fed back."""
    return prompt_tokens + max_tokens - 1


@dataclass(frozen=True, slots=True)
class PlanRow:
    """For sequences of `tokens` tokens: what each takes, and how many fit at once, by bytes and by slots."""

    tokens: int
    bytes_each: int
    fit_in_bytes: int
    fit: int


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What fits in a pool; bytes and tokens. `advice`: what to change if one full sequence does not fit."""

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


def plan(layout: KVLayout, *, slots: int, pool_bytes: int, weight_bytes: int, shared: bool = False) -> KVPlan:
    """How many sequences of which length fit at once.

    slots: most sequences that run at once. pool_bytes: memory for K and V. shared: the user gave one figure for weights
    and K/V together, so the advice names that flag.
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
        advice=_advice(layout, pool_bytes, fits_rows, weight_bytes if shared else 0),
    )


def _lengths(max_context: int) -> list[int]:
    """Powers of two from 128 up, and the full context."""
    return sorted({min(2**power, max_context) for power in range(7, max_context.bit_length() + 1)})


def _advice(layout: KVLayout, pool_bytes: int, fits_rows: int, shared_with: int) -> tuple[str, ...]:
    needed = layout.committed(layout.max_context)
    if fits_rows >= layout.max_context:
        return ()
    advice = [
        f"one sequence of {layout.max_context:,} tokens needs {size(needed)} of K/V, the pool has {size(pool_bytes)}"
    ]
    if fits_rows:
        advice.append(f"the longest sequence that fits has {fits_rows:,} tokens (--max-context {fits_rows})")
    heads = layout.num_kv_heads * pool_bytes // needed
    if 1 <= heads < layout.num_kv_heads:
        advice.append(f"a model with {heads} kv heads in place of {layout.num_kv_heads} would fit")
    flag = f"--memory {in_mib(shared_with + needed)}" if shared_with else f"--kv-memory {in_mib(needed)}"
    advice.append(f"or give the pool {size(needed)} ({flag})")
    return tuple(advice)


def in_mib(count: int) -> str:
    """Bytes the way a flag is written, rounded up."""
    return f"{math.ceil(count / 2**20)}MiB"


def size(count: int) -> str:
    """1536 -> '1.5 KiB', four digits."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def can_page() -> bool:
    """Whether this system can hand out a mapping page by page and take pages back: Linux with 4 KiB pages."""
    return os.path.exists("/proc/self/smaps") and hasattr(mmap, "MADV_DONTNEED") and mmap.PAGESIZE == PAGE_BYTES
