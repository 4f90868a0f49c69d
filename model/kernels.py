"""Loops compiled by numba for the CPU. Each output row is computed alone, so its bits depend on no other row.

Compiled once and kept on disk beside this file, or under NUMBA_CACHE_DIR; `python -m model.kernels` does it beforehand.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

# Sums may be reordered for SIMD, the same way each time; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

_TILE = 64  # keys whose transpose fits the first cache
_BLOCK = 8  # neighbouring rows of one sequence that share it

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts, the first exact


@njit(fastmath=_FAST, cache=True, nogil=True)
def _exponentials(row, powers):  # type: ignore[no-untyped-def]
    """row -> exp(row - max(row)) in place; returns their sum. `powers` is scratch, int32, as long as the row.

    exp(x) = 2^k x exp(r) with |r| <= ln(2)/2 and a polynomial for exp(r) (Moshier's Cephes, expf): plain arithmetic,
    which becomes SIMD where a call of the library's exp does not.
    """
    factors = powers.view(np.float32)
    highest = np.float32(-np.inf)
    for j in range(len(row)):
        highest = row[j] if row[j] > highest else highest
    for j in range(len(row)):
        x = row[j] - highest
        x = np.float32(-87.0) if x < np.float32(-87.0) else x  # written so that NaN stays NaN
        k = np.floor(x * _LOG2E + np.float32(0.5))
        r = x - k * _LN2_HIGH - k * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        row[j] = p * r * r + r + np.float32(1.0)
        powers[j] = (np.int32(k) + np.int32(127)) << np.int32(23)  # the bits of 2^k
    total = np.float32(0.0)
    for j in range(len(row)):
        row[j] *= factors[j]
        total += row[j]
    return total


@njit(fastmath=_FAST, cache=True, nogil=True)
def _score_tile(q, columns, scale, scores):  # type: ignore[no-untyped-def]
    """scores [TILE] = scale x q [D] . columns [D, TILE]; D is even, pairs of dimensions in one pass."""
    for j in range(_TILE):
        scores[j] = np.float32(0.0)
    for d in range(0, q.shape[0], 2):
        first, second = q[d] * scale, q[d + 1] * scale
        for j in range(_TILE):
            scores[j] += first * columns[d, j] + second * columns[d + 1, j]


@njit(fastmath=_FAST, cache=True, nogil=True)
def _mix(weights, values, total, out):  # type: ignore[no-untyped-def]
    """out [D] = weights [n] . values [n, D] / total, four rows in one pass."""
    dim, whole = out.shape[0], len(weights) // 4 * 4
    for d in range(dim):
        out[d] = np.float32(0.0)
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for d in range(dim):
            out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for j in range(whole, len(weights)):
        for d in range(dim):
            out[d] += weights[j] * values[j, d]
    for d in range(dim):
        out[d] /= total


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
    the window are never read, which is the mask. Query head h reads kv head h // (H // K). Neighbouring rows of one
    sequence share the transposed keys; what is computed with them is each row's own.
    """
    rows, heads, dim = q.shape
    kv_heads = pool.shape[3]
    group = heads // kv_heads
    begins = np.empty(rows + 1, np.int64)  # block b is rows begins[b]..begins[b + 1] - 1
    blocks = 0
    for n in range(rows):
        follows = n > 0 and slots[n] == slots[n - 1] and positions[n] == positions[n - 1] + 1
        if not follows or n - begins[blocks - 1] == _BLOCK:
            begins[blocks] = n
            blocks += 1
    begins[blocks] = rows
    for task in prange(blocks * kv_heads):
        begin, count = begins[task // kv_heads], begins[task // kv_heads + 1] - begins[task // kv_heads]
        kv = task % kv_heads
        start = max(0, positions[begin] + 1 - window)
        length = positions[begin + count - 1] + 1 - start
        keys = pool[slots[begin], layer, 0, kv, start : start + length]  # [n, D]
        values = pool[slots[begin], layer, 1, kv, start : start + length]  # [n, D]
        width = -(-length // _TILE) * _TILE
        scores = np.empty((count, group, width), np.float32)
        powers = np.empty(width, np.int32)
        columns = np.empty((dim, _TILE), np.float32)
        for tile in range(0, length, _TILE):
            for j in range(min(_TILE, length - tile)):
                for d in range(dim):
                    columns[d, j] = keys[tile + j, d]
            for i in range(count):
                for g in range(group):
                    _score_tile(q[begin + i, kv * group + g], columns, scale, scores[i, g, tile : tile + _TILE])
        for i in range(count):
            first = max(0, positions[begin + i] + 1 - window) - start
            stop = positions[begin + i] + 1 - start
            for g in range(group):
                weights = scores[i, g, first:stop]
                total = _exponentials(weights, powers)
                _mix(weights, values[first:stop], total, out[begin + i, kv * group + g])


if __name__ == "__main__":
    print("compiled:", ", ".join(str(signature) for signature in attend_rows.signatures))
