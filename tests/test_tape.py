"""A checkpoint with a scripted output: a fault in any position shows as a wrong byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import tape
from live import serve
from test_parity import TOKENS, forward

from tokenteller.model.checkpoint import load
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

DIGITS = "0123456789" * 6


def test_a_tape_plays_its_script_at_every_prompt_length_chunk_and_slot(tmp_path: Path) -> None:
    decoder = load(str(tape(tmp_path, DIGITS)), "fp32").decoder
    pool = KVPool(KVLayout.of(decoder.config, 64), slots=2)
    for length in (1, 2, 3, 5, 17, 40):
        for chunk in (1, 3, 16, 40):
            tokens = TOKENS[:length]
            for at in range(0, length, chunk):
                logits = forward(decoder, pool, (length % 2, tokens[at : at + chunk], at))[-1]
            for at in range(length, length + 20):
                tokens.append(int(logits.argmax()))
                logits = forward(decoder, pool, (length % 2, tokens[-1:], at))[-1]
            assert bytes(tokens[length:]).decode() == (DIGITS * 2)[length - 1 : length + 19]


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_a_served_tape_continues_where_the_prompt_ends_also_at_the_edge_of_the_context(
    tmp_path: Path, weights: str
) -> None:
    with serve(model=str(tape(tmp_path, DIGITS + "abcd")), slots=2, weights=weights, prefill_chunk=16) as server:
        for prompt, text in (("x", "0123"), ("xyz", "2345"), ("hello", "4567")):
            assert server.text(prompt, max_tokens=4, temperature=0) == text
        assert server.text("x" * 60, max_tokens=4, temperature=0) == "9abc"
        assert server.text("x" * 63, max_tokens=1, temperature=0) == "c"
        assert server.text("x", max_tokens=63, temperature=0) == DIGITS + "abc"
        for length in range(1, 62):
            assert server.text("x" * length, max_tokens=3, temperature=0) == (DIGITS + "abcd")[length - 1 : length + 2]
        assert server.post(prompt="x" * 60, max_tokens=5).status_code == 422


def test_a_tape_plays_on_where_a_prefix_was_reused_and_where_slots_were_used_before(tmp_path: Path) -> None:
    script = "".join(chr(ord("a") + at % 26) for at in range(256))
    with serve(model=str(tape(tmp_path, script, context=256)), slots=2, prefill_chunk=16) as server:
        cached = []
        for length in (100, 100, 140, 70, 101, 139, 1, 33):
            answer = server.generate("x" * length, max_tokens=20, temperature=0)
            assert answer["choices"][0]["text"] == script[length - 1 : length + 19]
            cached.append(answer["usage"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] == 99 and min(cached[2:6]) >= 69
