"""Loops compiled by numba for the CPU. Each output row is computed alone, so its bits depend on no other row.

Compiled once and kept on disk beside this file, or under NUMBA_CACHE_DIR; `python -m model.kernels` does it beforehand.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

# Sums may be reordered for SIMD, the same way each time; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(
    "void(f4[:,:,::1], f4[:,:,:,:,:,:], i8[::1], i8[::1], i8, f4, i8, f4[:,:,::1])",
    parallel=True,
    fastmath=_FAST,
    cache=True,
    nogil=True,
)
def attend_rows(q, pool, slots, positions, layer, scale, window, out):  # type: ignore[no-untyped-def]
    """softmax(q K^T * scale) V for each row n over the last `window` rows up to positions[n] of its own slot.

    q, out [N, H, D]; pool [slot, layer, 2, K, max_context, D]; slots, positions [N]. Rows past the position and behind
    the window are never read, which is the mask. Query head h reads kv head h // (H // K).
    """
    rows, heads, dim = q.shape
    kv_heads = pool.shape[3]
    group = heads // kv_heads
    for task in prange(rows * kv_heads):
        n = task // kv_heads
        kv = task % kv_heads
        first = max(0, positions[n] + 1 - window)
        length = positions[n] + 1 - first
        keys = pool[slots[n], layer, 0, kv, first:]  # [max_context - first, D]
        values = pool[slots[n], layer, 1, kv, first:]  # [max_context - first, D]
        weights = np.empty(length, np.float32)
        for head in range(kv * group, (kv + 1) * group):
            highest = np.float32(-np.inf)
            for j in range(length):
                score = np.float32(0.0)
                for d in range(dim):
                    score += q[n, head, d] * keys[j, d]
                weights[j] = score * scale
                highest = max(highest, weights[j])
            total = np.float32(0.0)
            for j in range(length):
                weights[j] = math.exp(weights[j] - highest)
                total += weights[j]
            for d in range(dim):
                out[n, head, d] = np.float32(0.0)
            for j in range(length):
                weight = weights[j] / total
                for d in range(dim):
                    out[n, head, d] += weight * values[j, d]


if __name__ == "__main__":
    print("compiled:", ", ".join(str(signature) for signature in attend_rows.signatures))
