"""KVPool: the preallocated K and V tensors, one contiguous slot per sequence, paged by the operating system.

    pool  [slot, layer, 2, kv_head, max_context, head_dim]      K = pool[s, l, 0], V = pool[s, l, 1]

On Linux the buffer is one anonymous mapping: address space for every slot at full length, physical pages only for rows
that were written. Releasing a slot hands its pages back, so memory follows the rows held.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenteller.model.kv_memory import PAGE_BYTES, KVLayout, size
from tokenteller.model.machine import available_memory

_MAP_NORESERVE = 0x4000
_MADV_NOHUGEPAGE = 15
_MADV_DONTFORK = 10
_DTYPES = {4: torch.float32, 2: torch.float16}


class PoolMemoryError(MemoryError):
    """The machine does not have the memory that the pool promises; the message has the numbers."""


class KVPool:
    """K and V of all slots. `kv` is the tensor above; `flat` is the same memory for the compiled kernels on a CPU.

    There fp16 is seen as its bits, uint16. What is beyond fp16's 65,504 becomes infinite and ends its request.
    """

    def __init__(self, layout: KVLayout, slots: int, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        """dtype: of layout.bytes_per_element bytes. Raises PoolMemoryError."""
        self.layout = layout
        self.slots = slots
        dtype = dtype or _DTYPES[layout.bytes_per_element]
        self._buffer = self._map() if layout.paged else None
        elements = slots * layout.slot_bytes // layout.bytes_per_element
        flat = (
            torch.frombuffer(self._buffer, dtype=dtype, count=elements)
            if self._buffer
            else self._reserve(device, dtype)
        )
        lane = layout.lane_bytes // layout.bytes_per_element
        heads, layers = layout.num_kv_heads, layout.num_layers
        self.kv = flat.as_strided(
            (slots, layers, 2, heads, layout.max_context, layout.head_dim),
            (layers * 2 * heads * lane, 2 * heads * lane, heads * lane, lane, layout.head_dim, 1),
        )
        self.lane = lane  # elements
        self.flat: NDArray[Any] | None = None
        if device == "cpu":
            self.flat = flat.numpy() if dtype == torch.float32 else flat.numpy().view(np.uint16)

    def _map(self) -> mmap.mmap:
        length = self.slots * self.layout.slot_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            buffer = mmap.mmap(-1, length + PAGE_BYTES, flags=flags)  # the last page is never touched
        except OSError as error:
            raise PoolMemoryError(
                f"cannot map {size(length)} of address space for {self.slots} slots: {error}"
            ) from error
        buffer.madvise(_MADV_NOHUGEPAGE)  # a huge page would charge 2 MiB for the first row of a lane
        # not of the last page: so the kernel merges it with no neighbour, not even with another pool
        buffer.madvise(_MADV_DONTFORK, 0, length)
        return buffer

    def _reserve(self, device: str, dtype: torch.dtype) -> torch.Tensor:
        """An ordinary tensor for all slots at full length."""
        length = self.slots * self.layout.slot_bytes
        try:
            return torch.zeros(length // self.layout.bytes_per_element, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's own out-of-memory error derives from it
            raise PoolMemoryError(
                f"the KV pool needs {size(length)} on {device} for {self.slots} slots of {self.layout.max_context} "
                f"tokens: {str(error).splitlines()[0]}; lower --slots or --max-context"
            ) from error

    def keys(self, slot: int, layer: int, rows: int) -> torch.Tensor:
        """K of the first `rows` rows of a slot: [K, rows, D], a view."""
        return self.kv[slot, layer, 0, :, :rows]

    def values(self, slot: int, layer: int, rows: int) -> torch.Tensor:
        """V of the first `rows` rows of a slot: [K, rows, D], a view."""
        return self.kv[slot, layer, 1, :, :rows]

    def write(self, layer: int, slots: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes row n of k and v [N, K, D] to row positions[n] of slot slots[n], in place."""
        self.kv[slots, layer, 0, :, positions] = k.to(self.kv.dtype)
        self.kv[slots, layer, 1, :, positions] = v.to(self.kv.dtype)

    def make_way(self, slot: int, start: int, stop: int) -> None:
        """To be told before rows start..stop-1 of a slot are computed: gives back pages that lie behind every window.

        So a slot of n rows holds layout.committed(n) bytes, and never more on the way there.
        """
        layout = self.layout
        if self._buffer is None or not layout.windows:
            return
        for layer, window in enumerate(layout.windows):
            if window is None:
                continue
            seen = max(0, start + 1 - window) * layout.row_bytes // PAGE_BYTES  # the first page that is looked at
            behind = min(layout.pages_behind(window, stop), seen)
            if behind > layout.pages_behind(window, start):
                self._give_back(slot, layer, behind)

    def _give_back(self, slot: int, layer: int, pages: int) -> None:
        """Gives back the first pages of a slot's lanes in one layer."""
        if self._buffer is not None and pages:
            lane = (slot * self.layout.num_layers + layer) * 2 * self.layout.num_kv_heads
            for at in range(lane, lane + 2 * self.layout.num_kv_heads):
                self._buffer.madvise(mmap.MADV_DONTNEED, at * self.layout.lane_bytes, pages * PAGE_BYTES)

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copies the first `rows` rows of one slot to another: of lanes with a window, those that are still there.

        The source must hold them (`layout.holds`). The target may have rows of its own, all before `rows`.
        """
        layout = self.layout
        for layer, window in enumerate(layout.windows or (None,) * layout.num_layers):
            behind = 0 if window is None else layout.pages_behind(window, rows)
            self._give_back(target, layer, behind)
            first = -(-behind * PAGE_BYTES // layout.row_bytes)
            self.kv[target, layer, :, :, first:rows] = self.kv[source, layer, :, :, first:rows]

    def release(self, slot: int, keep: int = 0) -> None:
        """Gives the slot's pages back; they read as zeros until written again: a new tenant sees nothing of the old.

        The pages that hold the first `keep` rows stay.
        """
        if self._buffer is None:
            self.kv[slot, :, :, :, keep:].zero_()
        elif not keep:
            self._buffer.madvise(mmap.MADV_DONTNEED, slot * self.layout.slot_bytes, self.layout.slot_bytes)
        else:
            kept = -(-keep * self.layout.row_bytes // PAGE_BYTES) * PAGE_BYTES
            start, lane = slot * self.layout.slot_bytes, self.layout.lane_bytes
            for at in range(start, start + self.layout.slot_bytes, lane):
                if kept < lane:
                    self._buffer.madvise(mmap.MADV_DONTNEED, at + kept, lane - kept)

    def resident_bytes(self) -> int:
        """The kernel's own figure for this mapping (Rss in /proc/self/smaps); all of it where it is not paged."""
        if self._buffer is None:
            return self.slots * self.layout.slot_bytes
        start, total, inside = self.kv.data_ptr(), 0, False
        end = start + self.slots * self.layout.slot_bytes
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                head = line.split(" ", 1)[0]
                if not head.endswith(":"):
                    low, high = (int(part, 16) for part in head.split("-"))
                    inside = start <= low and high <= end
                elif inside and head == "Rss:":
                    total += int(line.split()[1]) * 1024
        return total

    def check(self, budget_bytes: int) -> None:
        """Raises PoolMemoryError when the machine or its cgroup has less than `budget_bytes` left. Touches nothing.

        On a GPU the pool was allocated in full when it was made.
        """
        if self.kv.is_cuda:
            return
        available = available_memory()
        if budget_bytes > available:
            raise PoolMemoryError(
                f"the KV pool needs {size(budget_bytes)} but only {size(available)} of memory are available; "
                f"lower --kv-memory, --slots or --max-context"
            )

    def prefault(self, budget_bytes: int) -> None:
        """Writes to every page of `budget_bytes` and releases them, so that a shortage shows now and not under load.

        For an empty pool, after `check`. A machine that overcommits kills the process here if the memory is not there.
        """
        if self.flat is None:
            return  # a GPU allocates in full
        self.flat.view(np.uint8)[:budget_bytes:PAGE_BYTES] = 0
        if self._buffer is not None:
            self._buffer.madvise(mmap.MADV_DONTNEED)
