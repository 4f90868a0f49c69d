"""The pool's mapping against the formula and the kernel's own figure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool, PoolMemoryError

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=32, max_context=200)


def fill(pool: KVPool, slot: int, start: int, stop: int, value: float = 1.0) -> None:
    rows = stop - start
    k = torch.full((rows, pool.layout.num_kv_heads, pool.layout.head_dim), value)
    for layer in range(pool.layout.num_layers):
        pool.write(layer, torch.full((rows,), slot), torch.arange(start, stop), k, -k)


def test_an_untouched_pool_takes_no_memory() -> None:
    assert KVPool(LAYOUT, slots=64).resident_bytes() == 0


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.integers(0, 7), st.integers(1, 200), max_size=8),
    st.sampled_from([(16, 2), (32, 4), (64, 4), (80, 4), (128, 2)]),
)
def test_resident_memory_is_the_committed_bytes_of_the_rows_written(
    rows: dict[int, int], shape: tuple[int, int]
) -> None:
    layout = KVLayout(2, 2, head_dim=shape[0], max_context=200, bytes_per_element=shape[1])
    pool = KVPool(layout, slots=8)
    for slot, count in rows.items():
        fill(pool, slot, 0, count)
    assert pool.resident_bytes() == sum(layout.committed(count) for count in rows.values())
    for slot in rows:
        pool.release(slot)
    assert pool.resident_bytes() == 0


def test_a_new_tenant_sees_nothing_of_the_old() -> None:
    pool = KVPool(LAYOUT, slots=2)
    fill(pool, 1, 0, 150, value=7.0)
    pool.release(1)
    fill(pool, 1, 0, 1, value=2.0)
    assert float(pool.keys(1, 0, 1).max()) == 2.0
    assert not pool.kv[1, :, :, :, 1:].any()


def test_slots_and_lanes_do_not_touch() -> None:
    pool = KVPool(LAYOUT, slots=3)
    fill(pool, 1, 0, 200, value=5.0)
    assert not pool.kv[0].any() and not pool.kv[2].any()
    assert (pool.keys(1, 2, 200) == 5).all() and (pool.values(1, 2, 200) == -5).all()


def test_the_kernels_and_torch_see_the_same_memory() -> None:
    pool = KVPool(LAYOUT, slots=2)
    fill(pool, 0, 3, 4, value=9.0)
    head, dim = pool.lane, LAYOUT.head_dim
    layer = 2 * LAYOUT.num_kv_heads * head
    at = layer + head + 3 * dim  # slot 0, layer 1, K of head 1, row 3
    assert pool.flat is not None and pool.flat[at] == 9.0 and pool.flat[at + layer // 2] == -9.0


def test_checking_a_budget_touches_nothing() -> None:
    pool = KVPool(LAYOUT, slots=8)
    pool.kv[0, 0, 0, 0, 0] = 7
    pool.check(8 * LAYOUT.committed(200))
    assert (pool.kv[0, 0, 0, 0, 0] == 7).all() and pool.resident_bytes() == 4096


def test_a_budget_beyond_the_machine_is_refused_with_both_numbers() -> None:
    with pytest.raises(PoolMemoryError, match=r"needs 4096 TiB but only .* available"):
        KVPool(LAYOUT, slots=1).check(2**52)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_prefaulting_touches_the_budget_once_and_leaves_nothing_resident() -> None:
    """In a process of its own, whose peak tells that every page was there."""
    code = """
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

pool = KVPool(KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, max_context=16384), slots=8)
budget = 1 << 29
now, peak = status("VmRSS:"), status("VmHWM:")
pool.prefault(budget)
print(status("VmHWM:") - max(peak, now) > budget * 0.7, pool.resident_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_without_paging_every_slot_costs_its_full_length() -> None:
    layout = KVLayout(3, 2, 32, max_context=200, paged=False)
    pool = KVPool(layout, slots=2)
    assert pool.resident_bytes() == 2 * layout.slot_bytes
    assert layout.committed(1) == layout.committed(200) == layout.slot_bytes
    fill(pool, 0, 0, 5)
    pool.release(0)
    assert not pool.kv[0].any()


def test_pools_side_by_side_have_figures_of_their_own() -> None:
    pools = [KVPool(LAYOUT, slots=64) for _ in range(4)]  # the kernel lays mappings beside each other
    for rows, pool in enumerate(pools, start=1):
        fill(pool, 0, 0, 40 * rows)
    for rows, pool in enumerate(pools, start=1):
        assert pool.resident_bytes() == LAYOUT.committed(40 * rows)
