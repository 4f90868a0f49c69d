"""Attention over the pool: RoPE, K and V written where they belong, softmax(q K^T / sqrt(D)) V for each row."""

from __future__ import annotations

import numpy as np
from numba import njit

from tokenteller.model.kernels.exp import exponentials
from tokenteller.model.kernels.launch import entry, kernel
from tokenteller.model.kernels.scores import mix, put, scores_of
from tokenteller.model.kernels.target import FAST, FEW, LANES, PANEL, TILE


@njit(**FAST, inline="always")
def _keys_at(slot, layer, layers, kv, kv_heads, lane):  # type: ignore[no-untyped-def]
    """The pool's element at which one head's keys begin; its values begin kv_heads x lane elements later."""
    return ((slot * layers + layer) * 2 * kv_heads + kv) * lane


@njit(**FAST, inline="always")
def _rotate(row, cos, sin):  # type: ignore[no-untyped-def]
    """RoPE of one head in place: pairs are (i, i + D/2)."""
    half = len(cos)
    for i in range(half):
        first, second = row[i], row[half + i]
        row[i] = first * cos[i] - second * sin[i]
        row[half + i] = second * cos[i] + first * sin[i]


@kernel(**FAST)
def write_rows(begin, stop, q, k, v, cos, sin, flat, layers, lane, slots, positions, layer):  # type: ignore[no-untyped-def]
    """Rotates Q and K of rows begin..stop-1 in place; writes K and V to the pool."""
    heads, (_, kv_heads, dim) = q.shape[1], k.shape
    for n in range(begin, stop):
        for head in range(heads):
            _rotate(q[n, head], cos[n], sin[n])
        for head in range(kv_heads):
            key, value = k[n, head], v[n, head]
            _rotate(key, cos[n], sin[n])
            at = _keys_at(slots[n], layer, layers, head, kv_heads, lane) + positions[n] * dim
            for d in range(dim):
                put(flat, at + d, key[d])
                put(flat, at + kv_heads * lane + d, value[d])


@njit(**FAST, inline="always")
def _attend(q, begin, stop, kv, group, positions, window, flat, base, half, out):  # type: ignore[no-untyped-def]
    """One kv head for rows begin..stop-1, which are neighbours in a sequence; its keys begin at `base`.

    Weights of rows past a query's position or behind its window are 0, which changes no sum.
    """
    dim, many = q.shape[2], (stop - begin) * group
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    filled = -(-many // 4) * 4
    first = max(0, positions[begin] + 1 - window)
    count = positions[stop - 1] + 1 - first
    ours = np.zeros((filled, dim), np.float32)
    scores = np.zeros((filled, -(-count // LANES) * LANES), np.float32)
    sums = np.empty((TILE, PANEL), np.float32)
    totals = np.empty(many, np.float32)
    for row in range(many):
        for d in range(dim):
            ours[row, d] = q[begin + row // group, kv * group + row % group, d]
    scores_of(ours, many, flat, base + first * dim, half, count, scale, scores)
    for row in range(many):
        position = positions[begin + row // group]
        low, high = max(0, position + 1 - window) - first, position + 1 - first
        for j in range(low):
            scores[row, j] = np.float32(0.0)
        for j in range(high, scores.shape[1]):
            scores[row, j] = np.float32(0.0)
        totals[row] = exponentials(scores[row, low:high])
    mix(scores, count, flat, base + half + first * dim, sums, ours)
    for row in range(many):
        for d in range(dim):
            out[begin + row // group, kv * group + row % group, d] = ours[row, d] / totals[row]


@kernel(**FAST)
def attend_runs(begin, stop, q, kv_heads, runs, flat, layers, lane, slots, positions, layer, window, out):  # type: ignore[no-untyped-def]
    """Tasks are a run of neighbouring rows and a kv head each; run r is rows runs[r]..runs[r + 1] - 1."""
    tasks = (len(runs) - 1) * kv_heads
    half = kv_heads * lane  # from K to V
    for turn in range(begin, stop):
        task = tasks - 1 - turn // 2 if turn % 2 else turn // 2  # long and short ones in turn: equal shares
        run, kv = task // kv_heads, task % kv_heads
        base = _keys_at(slots[runs[run]], layer, layers, kv, kv_heads, lane)
        group = q.shape[1] // kv_heads
        _attend(q, runs[run], runs[run + 1], kv, group, positions, window, flat, base, half, out)


@njit(**FAST, inline="always")
def _runs(slots, positions):  # type: ignore[no-untyped-def]
    """Where runs of at most FEW neighbouring rows of one sequence begin, and the end of the last."""
    begins = np.empty(len(slots) + 1, np.int64)
    count = 0
    for n in range(len(slots)):
        follows = n > 0 and slots[n] == slots[n - 1] and positions[n] == positions[n - 1] + 1
        if not follows or n - begins[count - 1] == FEW:
            begins[count] = n
            count += 1
    begins[count] = len(slots)
    return begins[: count + 1]


@entry
def attend(qkv, turns, flat, layers, lane, where, out):  # type: ignore[no-untyped-def]
    """Rotates Q and K in place, writes K and V to the pool; out [N, H, D] = softmax(q K^T / sqrt(D)) V.

    qkv: q [N, H, D], k and v [N, K, D]; turns: RoPE's cos and sin [N, D/2]; flat: the pool [slot, layers, 2, K, lane]
    in fp32 or bits of fp16, a lane being the rows [max_context, D] of one head and what fills up its last page; where:
    slots [N], positions [N], layer and window. Row n looks at the last `window` rows up to positions[n] of its own
    slot: query head h reads kv head h // (H // K). Neighbouring rows of one sequence are one thread's, which goes
    through their keys and values once for all of them.
    """
    q, k, v = qkv
    cos, sin = turns
    slots, positions, layer, window = where
    kv_heads = k.shape[1]
    write_rows(len(q), len(q) >= FEW, (q, k, v, cos, sin, flat, layers, lane, slots, positions, layer))
    runs = _runs(slots, positions)
    tasks = (len(runs) - 1) * kv_heads
    attend_runs(tasks, True, (q, kv_heads, runs, flat, layers, lane, slots, positions, layer, window, out))
