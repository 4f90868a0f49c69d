"""Attention against the textbook's worked numbers, and the compiled kernel against the textbook form."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import pytest
import torch

from tokenteller.model.attention import RopeTable, causal_mask, rope_frequencies, rotate, scaled_dot_product
from tokenteller.model.config import ModelConfig, Rope
from tokenteller.model.kernels import attend
from tokenteller.model.kernels.exp import exponentials

Array = np.ndarray[Any, Any]

Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
K = torch.tensor([[0.8, 0.2], [0.1, 0.9], [0.5, 0.5]])
V = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])


def test_three_tokens_give_the_textbooks_weights_and_outputs() -> None:
    _, weights, out = scaled_dot_product(Q, K, V, torch.zeros(3, 3))
    torch.testing.assert_close(
        weights[0], torch.tensor([0.413, 0.252, 0.335]), atol=1e-3, rtol=0
    )  # given to three digits
    expected = torch.tensor([[0.539, 0.461], [0.470, 0.530], [0.5, 0.5]])
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=0)  # given to three digits


def test_the_mask_is_minus_infinity_and_not_zero() -> None:
    """With 0 in place of -inf a blocked key still gets weight exp(0)."""
    mask = causal_mask(3, 3)
    assert mask.tolist() == [[0, -math.inf, -math.inf], [0, 0, -math.inf], [0, 0, 0]]
    _, weights, out = scaled_dot_product(Q, K, V, mask)
    assert weights[0].tolist() == [1.0, 0.0, 0.0]
    assert out[0].tolist() == V[0].tolist()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def test_the_mask_is_aligned_to_the_last_key_when_rows_are_cached() -> None:
    assert causal_mask(2, 4).tolist() == [[0, 0, 0, -math.inf], [0, 0, 0, 0]]


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_scaling_brings_the_variance_of_scores_from_head_dim_to_one(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4000, dim, generator=generator) for _ in range(2))
    raw = (q * k).sum(-1)
    scores, _, _ = scaled_dot_product(q[:, None], k[:, None], k[:, None], torch.zeros(1, 1))
    assert raw.var().item() == pytest.approx(dim, rel=0.15)
    assert scores.var().item() == pytest.approx(1, rel=0.15)


def test_rotated_scores_depend_on_the_distance_only() -> None:
    config = ModelConfig(8, 8, 8, 1, 1, 1, head_dim=32, max_context=64)
    cos, sin = RopeTable(config)(torch.arange(64))
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(1)).unbind(0)

    def score(at: int, to: int) -> float:
        return float(
            (rotate(q, cos[at : at + 1], sin[at : at + 1]) * rotate(k, cos[to : to + 1], sin[to : to + 1])).sum()
        )

    assert score(9, 4) == pytest.approx(score(40, 35), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)
    torch.testing.assert_close(rotate(q, cos[:1], sin[:1]), q)  # position 0 turns nothing


def test_the_rope_table_grows_by_pieces_to_the_same_bits() -> None:
    """1M positions of context cost nothing before they come."""
    config = ModelConfig(8, 8, 8, 1, 1, 1, head_dim=48, max_context=2**20)
    table = RopeTable(config)
    assert not len(table.cos)
    positions = torch.tensor([0, 4095, 4096, 9000])
    angles = torch.arange(3 * RopeTable.PIECE, dtype=torch.float32)[:, None] * rope_frequencies(Rope(), 48)
    for got, whole in zip(table(positions), (angles.cos(), angles.sin()), strict=True):
        assert torch.equal(got, whole[positions])
    assert len(table.cos) == 3 * RopeTable.PIECE


def attended(q: Array, pool: Array, slots: Any, positions: Any, layer: int = 0, window: int = 1000) -> Array:
    """attend() for q [N, H, D] on a pool [slot, layer, 2, K, rows, D] whose rows are there already and not turned."""
    bits = pool if pool.dtype == np.float32 else pool.view(np.uint16)
    slots, positions = np.asarray(slots), np.asarray(positions)
    q = q.copy()
    _, layers, _, _, rows, dim = pool.shape
    k, v = (pool[slots, layer, at, :, positions].astype(np.float32) for at in (0, 1))  # [N, K, D] each
    turns = np.ones((len(q), dim // 2), np.float32), np.zeros((len(q), dim // 2), np.float32)
    out = np.empty_like(q)
    where = slots, positions, layer, window
    attend((q, k, v), turns, bits.reshape(-1), layers, rows * dim, where, out)
    return out


@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 2, 80), (4, 1, 32), (6, 2, 24), (9, 3, 64)])
def test_the_kernel_equals_the_textbook_form_on_each_slot(
    heads: int, kv_heads: int, dim: int, kept: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(heads)
    pool = torch.randn(3, 2, 2, kv_heads, 40, dim, generator=generator).to(kept)
    slots, positions = [2, 0, 2, 1], [0, 39, 17, 5]
    q = torch.randn(4, heads, dim, generator=generator)
    out = torch.from_numpy(attended(q.numpy(), pool.numpy(), slots, positions, layer=1))
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        for head in range(heads):
            kv = head // (heads // kv_heads)  # neighbouring query heads share a kv head
            keys, values = pool[slot, 1, 0, kv, : position + 1], pool[slot, 1, 1, kv, : position + 1]
            where = keys.float(), values.float(), torch.zeros(1, position + 1)
            _, _, expected = scaled_dot_product(q[row, head][None], *where)
            torch.testing.assert_close(out[row, head], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [np.float32, np.float16])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(kept: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(9, 1, 2, 2, 64, 32, generator=generator).numpy().astype(kept)
    q = torch.randn(33, 4, 32, generator=generator).numpy()
    slots, positions = np.arange(33) % 9, np.arange(33) * 7 % 64
    together = attended(q, pool, slots, positions)
    for row in range(33):
        one = slice(row, row + 1)
        assert (attended(q[one], pool, slots[one], positions[one])[0] == together[row]).all()


@pytest.mark.parametrize("dim", [4, 64])
def test_rows_past_the_position_are_never_read(dim: int) -> None:
    for last in range(19):
        pool = np.full((1, 1, 2, 1, 20, dim), np.nan, np.float32)
        pool[0, 0, :, 0, : last + 1] = 1.0
        for heads in (1, 3):
            assert (attended(np.ones((1, heads, dim), np.float32), pool, [0], [last]) == 1.0).all()


@pytest.mark.parametrize("kept", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [24, 64])
def test_neighbouring_rows_of_one_sequence_have_the_bits_of_each_alone(dim: int, kept: Any) -> None:
    """Rows of a chunk are one task; a window makes each begin elsewhere."""
    generator = torch.Generator().manual_seed(6)
    pool = torch.randn(1, 1, 2, 2, 200, dim, generator=generator).numpy().astype(kept)
    q = torch.randn(70, 6, dim, generator=generator).numpy()
    slots, positions = np.zeros(70, np.int64), np.arange(100, 170)
    for window in (200, 13):
        together = attended(q, pool, slots, positions, window=window)
        for row in range(70):
            one = slice(row, row + 1)
            assert (attended(q[one], pool, slots[one], positions[one], window=window)[0] == together[row]).all()


def test_nan_in_a_key_is_not_smoothed_over() -> None:
    pool = np.ones((1, 1, 2, 1, 8, 4), np.float32)
    pool[0, 0, 0, 0, 1] = np.nan
    assert np.isnan(attended(np.ones((1, 1, 4), np.float32), pool, [0], [2])).all()


def test_fp16_rows_are_rounded_to_the_nearest_and_beyond_its_range_infinite() -> None:
    values = np.array([[[1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65520.0, 1e-8, -2.5, 0.1]]], np.float32)
    pool, turns = np.zeros(2 * 8, np.uint16), (np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32))
    where, at = (np.zeros(1, np.int64), np.zeros(1, np.int64), 0, 9), np.zeros((1, 1, 8), np.float32)
    attend((at, values.copy(), values), turns, pool, 1, 8, where, at.copy())
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).reshape(-1)
    assert (pool.view(np.float16).reshape(2, 8) == expected).all() and np.isinf(expected[4])


def test_keys_are_rotated_and_written_where_their_row_is() -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, 2, 3, 8, generator=generator).unbind(0)  # [N, heads, D] each
    cos, sin = torch.rand(2, 2, 4, generator=generator).unbind(0)
    pool = np.zeros((2, 2, 2, 3, 5, 8), np.float32)
    where = np.array([1, 0]), np.array([4, 2]), 1, 9
    qkv, turns = (q.numpy().copy(), k.numpy().copy(), v.numpy()), (cos.numpy(), sin.numpy())
    attend(qkv, turns, pool.reshape(-1), 2, 5 * 8, where, np.empty((2, 3, 8), np.float32))
    torch.testing.assert_close(torch.from_numpy(qkv[0]), rotate(q, cos, sin))
    torch.testing.assert_close(torch.from_numpy(pool[1, 1, 0, :, 4]), rotate(k, cos, sin)[0])
    torch.testing.assert_close(torch.from_numpy(pool[0, 1, 0, :, 2]), rotate(k, cos, sin)[1])
    assert (pool[1, 1, 1, :, 4] == v[0].numpy()).all() and (pool[0, 1, 1, :, 2] == v[1].numpy()).all()
    assert np.count_nonzero(pool) == 2 * 2 * 3 * 8


@numba.njit
def softmax_numerators(row):  # type: ignore[no-untyped-def]
    return exponentials(row)


def test_the_sum_of_softmax_has_one_order_on_every_cpu() -> None:
    """Four sums of 16 lanes, then one of 8, then one by one; lanes by halves. A compiler's own order would depend on
    the CPU and on the code around it."""

    def lanes(vector: Any) -> Any:
        while len(vector) > 1:
            vector = vector[: len(vector) // 2] + vector[len(vector) // 2 :]
        return vector[0]

    rng = np.random.default_rng(0)
    for length in range(1, 300, 7):
        row = rng.normal(size=length).astype(np.float32)
        total = softmax_numerators(row)  # row: the numerators
        wide, narrow = length // 64 * 64, length // 8 * 8
        expected = np.float32(0.0)
        if wide:
            sums = np.zeros((4, 16), np.float32)
            for block in row[:wide].reshape(-1, 4, 16):
                sums += block
            expected = lanes(sums[3] + (sums[2] + (sums[1] + sums[0])))
        if narrow > wide:
            eight = np.zeros(8, np.float32)
            eight[0] = expected
            for block in row[wide:narrow].reshape(-1, 8):
                eight += block
            expected = lanes(eight)
        for value in row[narrow:]:
            expected += value
        assert total == expected, length
