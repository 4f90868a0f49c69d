"""Sliding windows: formula, committed bytes and the kernel's own figure agree, and no row is given up too early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import config_of, random_hf
from hypothesis import given
from hypothesis import strategies as st
from live import serve
from test_parity import TOKENS, close, forward, greedy, twin_of

from tokenteller.model.checkpoint import load
from tokenteller.model.kv_memory import PAGE_BYTES, KVLayout
from tokenteller.model.kv_pool import KVPool


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 400)), min_size=1, max_size=4))
    return KVLayout(
        num_layers=len(windows),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 48, 64, 80, 128, 2048])),
        max_context=draw(st.integers(2, 600)),
        windows=tuple(windows),
        chunk=draw(st.integers(1, 64)),
    )


@given(layouts(), st.integers(0, 600))
def test_committed_never_falls_as_rows_grow_and_covers_the_formula(layout: KVLayout, rows: int) -> None:
    rows = min(rows, layout.max_context)
    assert layout.committed(rows) <= layout.committed(min(rows + 1, layout.max_context)) <= layout.slot_bytes
    assert layout.kv_bytes(rows) <= layout.committed(rows)
    full = KVLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.max_context)
    assert layout.committed(rows) <= full.committed(rows)


@given(layouts(), st.integers(1, 64), st.data())
def test_whatever_a_chunk_looks_at_is_in_the_pages_that_are_kept(
    layout: KVLayout, rows: int, data: st.DataObject
) -> None:
    rows = min(rows, layout.chunk, layout.max_context)
    start = data.draw(st.integers(0, layout.max_context - rows))
    for window in layout.windows:
        if window is not None:
            given_back = layout.pages_behind(window, start + rows) * PAGE_BYTES
            assert given_back <= max(0, start + 1 - window) * layout.row_bytes


@given(layouts(), st.data())
def test_a_slot_holds_what_it_says_it_holds(layout: KVLayout, data: st.DataObject) -> None:
    computed = data.draw(st.integers(0, layout.max_context))
    assert layout.holds(computed, computed)
    assert not layout.holds(computed, computed + 1)
    rows = data.draw(st.integers(0, computed))
    lost = any(
        window is not None and layout.pages_behind(window, computed) > layout.pages_behind(window, rows)
        for window in layout.windows
    )
    assert layout.holds(computed, rows) == (not lost)


@given(layouts(), st.integers(0, 2**26))
def test_rows_that_fit_fit_and_one_more_does_not(layout: KVLayout, pool_bytes: int) -> None:
    rows = layout.rows_that_fit(pool_bytes)
    assert layout.committed(rows) <= pool_bytes
    assert rows == layout.max_context or layout.committed(rows + 1) > pool_bytes


def test_the_formula_by_hand() -> None:
    """Two layers of one kv head of 64 in fp32: 1,024 bytes a token, half of it in the layer with a window of 100."""
    layout = KVLayout(2, 1, 64, max_context=1000, windows=(100, None), chunk=1)
    assert layout.bytes_per_token == 1024
    assert [layout.kv_bytes(rows) for rows in (1, 100, 101, 1000)] == [1024, 102_400, 102_912, 512 * (100 + 1000)]
    # a page has 16 rows: 100 of them lie in 7 pages, or in 8 if they begin in the middle of one
    assert layout.committed(1000) == 2 * PAGE_BYTES * (8 + 63)
    assert layout.rows_that_fit(2 * PAGE_BYTES * (8 + 10)) == 160


@pytest.mark.parametrize("chunks", [(1, 1, 1, 5), (7, 1, 16), (16,)])
def test_the_kernel_holds_exactly_the_committed_bytes_after_every_chunk(chunks: tuple[int, ...]) -> None:
    layout = KVLayout(3, 2, 64, max_context=700, windows=(40, None, 200), chunk=16)
    pool = KVPool(layout, slots=3)
    start, step = 0, 0
    while start < 700:
        rows = min(chunks[step % len(chunks)], 700 - start)
        pool.make_way(1, start, start + rows)
        row = torch.ones(rows, 2, 64)
        for layer in range(3):
            pool.write(layer, torch.full((rows,), 1), torch.arange(start, start + rows), row, row)
        start, step = start + rows, step + 1
        if step % 7 == 0 or start in (40, 41, 120, 200, 700):
            assert pool.resident_bytes() == layout.committed(start)
    pool.release(1)
    assert pool.resident_bytes() == 0


def test_pages_behind_the_window_are_gone_while_the_logits_stay_those_of_the_reference(tmp_path: Path) -> None:
    """Rows of 512 floats: two a page, so that a window of 8 gives pages back soon."""
    config = config_of("mistral", head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    twin = twin_of(random_hf(tmp_path, config))
    layout = KVLayout.of(twin.decoder.config, 256, chunk=5)
    pool = KVPool(layout, slots=2)
    parts = []
    for at in range(0, 100, 5):
        pool.make_way(1, at, at + 5)
        parts.append(forward(twin.decoder, pool, (1, TOKENS[at : at + 5], at)))
    assert pool.resident_bytes() == layout.committed(100) == 2 * 2 * PAGE_BYTES * 7  # 12 rows in 6 pages, and one more
    assert not pool.kv[1, 0, 0, 0, :80].any(), "the beginning is still there"
    close(torch.cat(parts), twin.expected(TOKENS[:100]))


def test_a_served_model_with_windows_takes_no_more_than_its_ledger_says(tmp_path: Path) -> None:
    config = config_of("mistral", head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    directory = random_hf(tmp_path, config)
    with serve(model=str(directory), slots=4, weights="fp32", prefill_chunk=8) as server:
        pool = server.service.engine.runner.pool
        most = pool.layout.committed(256)
        assert most < pool.layout.lanes * pool.layout.lane_bytes / 4
        frames = server.stream(TOKENS[:60], max_tokens=150, temperature=0, ignore_eos=True)
        assert frames[0]["kv"]["max"] == most
        slots = server.wait_idle()["pool"]
        assert slots["committed_bytes"] == slots["resident_bytes"] <= most
    twin = twin_of(directory)
    with torch.inference_mode():
        twin.reference.generation_config.eos_token_id = None
        prompt = torch.tensor([TOKENS[:60]])
        played = twin.reference.generate(prompt, max_new_tokens=150, do_sample=False, pad_token_id=0, use_cache=False)
    tokens = [token for frame in frames if frame["type"] == "token" for token in frame["token_ids"]]
    assert tokens == played[0, 60:].tolist()


def test_a_prefix_is_reused_only_while_its_rows_are_there_and_changes_no_token(tmp_path: Path) -> None:
    """Rows of 512 floats, two a page, window 40: a slot that went on for long has lost what a prefix's end looks at."""
    config = config_of("mistral", head_dim=512, num_attention_heads=2, num_key_value_heads=1, sliding_window=40)
    directory = random_hf(tmp_path, config)
    decoder = load(str(directory), "fp32").decoder
    with serve(model=str(directory), slots=4, weights="fp32", prefill_chunk=8) as server:
        first, fresh = TOKENS[:60], {"temperature": 0, "ignore_eos": True, "max_tokens": 20}
        answer = server.generate(first, **fresh)
        turn = first + answer["choices"][0]["token_ids"]
        cached = []
        for prompt in (turn + TOKENS[150:160], first[:50] + TOKENS[170:180], turn + TOKENS[100:120]):
            reused = server.generate(prompt, **fresh)
            alone = greedy(decoder, KVPool(KVLayout.of(decoder.config, 256), slots=1), prompt, 20)
            assert reused["choices"][0]["token_ids"] == alone
            cached.append(reused["usage"]["cached_tokens"])
        assert cached == [len(turn) - 1, 0, 0]  # only the slot that stopped there still has what comes before
        pool = server.wait_idle()["pool"]
        assert pool["resident_bytes"] <= pool["committed_bytes"]


def test_a_prefix_copied_over_rows_of_its_own_leaves_none_behind_the_window(tmp_path: Path) -> None:
    """The second choice computes what was planned for it until the first has computed their prompt."""
    config = config_of("mistral", head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    directory = random_hf(tmp_path, config)
    with serve(model=str(directory), slots=8, weights="fp32", prefill_chunk=8) as server:
        copy, copied = KVPool.copy, []

        def watched(pool: KVPool, source: int, target: int, rows: int) -> None:
            copied.append((bool(pool.kv[target, 0, 0, 0, 0].any()), rows))
            copy(pool, source, target, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVPool, "copy", watched)
            server.generate(TOKENS[:60], n=2, max_tokens=1, temperature=0)
        assert copied == [(True, 59)]
        pool = server.wait_idle()["pool"]
        assert pool["resident_bytes"] == pool["committed_bytes"]
