"""Attention's two products for one kv head: scores of queries against keys in the pool, and weighted sums of values."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

import tokenteller.model.kernels.emit as emit
from tokenteller.model.kernels.emit import F16, F32, FLOATS, I16, I32, I64, ZEROS
from tokenteller.model.kernels.floats import tiles
from tokenteller.model.kernels.target import FAST, LANES, PANEL


@intrinsic
def get(typing, flat, at):  # type: ignore[no-untyped-def]
    """Number `at` of the pool, as fp32."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = builder.load(builder.gep(emit.data(context, builder, flat, args[0]), [args[1]]))
        return value if flat.dtype == types.float32 else builder.fpext(builder.bitcast(value, F16), F32)

    return types.float32(flat, types.intp), build


@intrinsic
def put(typing, flat, at, value):  # type: ignore[no-untyped-def]
    """Number `at` of the pool = value, rounded to the nearest that it can hold."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = args[2]
        if flat.dtype != types.float32:
            value = builder.bitcast(builder.fptrunc(value, F16), I16)
        builder.store(value, builder.gep(emit.data(context, builder, flat, args[0]), [args[1]]))
        return context.get_dummy_value()

    return types.void(flat, types.intp, types.float32), build


@intrinsic
def _prefetch(typing, flat, at):  # type: ignore[no-untyped-def]
    """Prefetches the cache line with element `at` of the pool."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        emit.prefetch(builder, emit.data(context, builder, flat, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(flat, types.intp), build


@njit(**FAST, inline="always")
def _look_ahead(flat, at, length, half, ahead):  # type: ignore[no-untyped-def]
    """Prefetches the keys `ahead` elements later and the values: the hardware's own prefetching ends at a page."""
    for place in range(at, at + length, 64 // flat.itemsize):
        _prefetch(flat, place + ahead)
        _prefetch(flat, place + half)


@intrinsic(prefer_literal=True)
def _key_tile(typing, queries, q, q_at, flat, k_at, left, dim, scale, out, out_at, out_stride):  # type: ignore[no-untyped-def]
    """out[r, :n] = scale x q[r] . keys[:n] for some queries r and n = LANES / queries keys; `queries` is a literal.

    q is fp32, from element q_at on, its rows `dim` apart, which is a multiple of LANES; keys are those from element
    k_at of the pool on. If fewer than n are `left`, the last one stands for those beyond it.
    """

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        _, q_array, q_at, pool, k_at, left, dim, scale, scores, out_at, out_stride = args
        rows, last = range(queries.literal_value), builder.sub(left, I64(1))
        keys = range(LANES // len(rows))
        q_base = builder.gep(emit.data(context, builder, q, q_array), [q_at])
        k_base = builder.gep(emit.data(context, builder, flat, pool), [k_at])
        q_rows = [builder.gep(q_base, [builder.mul(dim, I64(row))]) for row in rows]
        k_rows = []
        for key in keys:
            there = builder.select(builder.icmp_signed("<", I64(key), last), I64(key), last)
            k_rows.append(builder.gep(k_base, [builder.mul(dim, there)]))
        loop = emit.Loop(builder, builder.udiv(dim, I64(LANES)), [ZEROS] * LANES)
        place = builder.mul(loop.at, I64(LANES))
        k_parts = [emit.widened(builder, flat.dtype, line, place) for line in k_rows]
        totals = iter(loop.carried)
        longer = []
        for line in q_rows:
            q_part = emit.load(builder, line, place, FLOATS)
            longer += [emit.fma(builder, q_part, k_part, next(totals)) for k_part in k_parts]
        loop.end(longer)
        total = builder.fmul(emit.sum_lanes(builder, longer), emit.splat(builder, scale))
        base = builder.gep(emit.data(context, builder, out, scores), [out_at])
        for row in rows:
            ours = ir.Constant(ir.VectorType(I32, len(keys)), [row * len(keys) + key for key in keys])
            part = builder.shuffle_vector(total, total, ours)
            emit.store(builder, part, base, builder.mul(out_stride, I64(row)))
        return context.get_dummy_value()

    at = types.intp
    return types.void(queries, q, at, flat, at, at, at, types.float32, out, at, at), build


@njit(**FAST, inline="always")
def _scores_one_by_one(q, many, flat, base, count, scale, out):  # type: ignore[no-untyped-def]
    dim = q.shape[1]
    for row in range(many):
        for j in range(count):
            total = np.float32(0.0)
            for d in range(dim):
                total += q[row, d] * get(flat, base + j * dim + d)
            out[row, j] = total * scale


@njit(**FAST, inline="always")
def scores_of(q, many, flat, base, half, count, scale, out):  # type: ignore[no-untyped-def]
    """out [Q, :count] = scale x q [Q, D] . keys for the first `many` queries; keys [count, D] from element `base` on.

    q is filled up to a multiple of 4 queries, out to that and, in keys, to a multiple of LANES. Values lie `half`
    elements after the keys.
    """
    dim, width = q.shape[1], out.shape[1]
    if dim % LANES:
        _scores_one_by_one(q, many, flat, base, count, scale, out)
    else:
        at = 0
        while many - at > 1:
            for j in range(0, count, LANES // 4):
                if at == 0:
                    _look_ahead(flat, base + j * dim, LANES // 4 * dim, half, LANES * dim)
                _key_tile(4, q, at * dim, flat, base + j * dim, count - j, dim, scale, out, at * width + j, width)
            at += 4
        if at < many:
            for j in range(0, count, LANES):
                if at == 0:
                    _look_ahead(flat, base + j * dim, LANES * dim, half, LANES * dim)
                _key_tile(1, q, at * dim, flat, base + j * dim, count - j, dim, scale, out, at * width + j, width)


@njit(**FAST, inline="always")
def mix(weights, count, flat, base, sums, out):  # type: ignore[no-untyped-def]
    """out [Q, D] = weights [Q, :count] . V; V [count, D] begins at element `base`."""
    (rows, dim), width = out.shape, weights.shape[1]
    for column in range(0, dim - PANEL + 1, PANEL):
        at = 0
        while at < rows:
            made = tiles(rows - at, (weights, at * width, width, flat, base + column, dim, count, sums))
            for row in range(made):
                for d in range(PANEL):
                    out[at + row, column + d] = sums[row, d]
            at += made
    for column in range(dim // PANEL * PANEL, dim):
        for row in range(rows):
            total = np.float32(0.0)
            for j in range(count):
                total += weights[row, j] * get(flat, base + j * dim + column)
            out[row, column] = total
