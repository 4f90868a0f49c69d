"""The decoder against transformers, and cached decoding against computing everything again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import random_llama

from tokenteller.model.attention import Batch
from tokenteller.model.checkpoint import CheckpointError, load
from tokenteller.model.config import Storage
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool


def pool_for(decoder: Decoder, slots: int = 4) -> KVPool:
    return KVPool(KVLayout.of(decoder.config, decoder.config.max_context), slots)


def forward(decoder: Decoder, pool: KVPool, slot: int, tokens: list[int], start: int) -> torch.Tensor:
    """Logits [T, vocab] of all new tokens of one sequence."""
    positions = torch.arange(start, start + len(tokens))
    rows = torch.arange(len(tokens))
    batch = Batch(torch.tensor(tokens), torch.full_like(positions, slot), positions, rows)
    return decoder.forward(batch, pool)


TOKENS = [(37 * at + 11) % 264 for at in range(60)]


@pytest.mark.parametrize(("heads", "kv_heads", "tied"), [(4, 4, False), (4, 2, True), (4, 1, False), (6, 2, False)])
def test_logits_equal_transformers(tmp_path: Path, heads: int, kv_heads: int, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    directory = random_llama(
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        head_dim=24,
        hidden_size=96,
    )
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    decoder = load(str(directory), "fp32").decoder
    torch.testing.assert_close(forward(decoder, pool_for(decoder), 0, TOKENS, 0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 16, 60])
def test_cached_decoding_equals_computing_everything_again(rand: Path, chunk: int) -> None:
    decoder = load(str(rand), "fp32").decoder
    whole = forward(decoder, pool_for(decoder), 0, TOKENS, 0)
    pool = pool_for(decoder)
    parts = [forward(decoder, pool, 2, TOKENS[at : at + chunk], at) for at in range(0, len(TOKENS), chunk)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_a_key_is_rotated_once_at_its_own_position(rand: Path) -> None:
    """What was written for a row stays as it is when later rows are computed."""
    decoder = load(str(rand), "fp32").decoder
    pool = pool_for(decoder)
    forward(decoder, pool, 0, TOKENS[:10], 0)
    before = pool.kv[0, :, :, :, :10].clone()
    for at in range(10, 30):
        forward(decoder, pool, 0, TOKENS[at : at + 1], at)
    assert torch.equal(pool.kv[0, :, :, :, :10], before)


@pytest.mark.parametrize("storage", ["fp16", "int8", "int4"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_crowd(rand: Path, storage: Storage) -> None:
    decoder = load(str(rand), storage).decoder
    alone = forward(decoder, pool_for(decoder), 0, TOKENS[:5], 0)
    crowd = TOKENS[:5] + TOKENS[20:47]
    positions = torch.tensor([*range(5), *range(27)])
    slots = torch.tensor([1] * 5 + [3] * 27)
    batch = Batch(torch.tensor(crowd), slots, positions, torch.arange(32))
    assert torch.equal(decoder.forward(batch, pool_for(decoder))[:5], alone)


def test_fp16_loses_nothing_that_the_file_has(tmp_path: Path) -> None:
    directory = random_llama(tmp_path)
    exact, packed = (load(str(directory), storage).decoder for storage in ("fp32", "fp16"))
    a = forward(exact, pool_for(exact), 0, TOKENS, 0)
    b = forward(packed, pool_for(packed), 0, TOKENS, 0)
    # weights of about 0.2 rounded to 11 bits, summed over 64 products
    torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)
    assert (a.argmax(-1) == b.argmax(-1)).float().mean() > 0.9


def test_a_missing_a_misshapen_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = random_llama(tmp_path)
    file = directory / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for broken, word in (
        ({key: value for key, value in weights.items() if key != name}, "missing"),
        (weights | {name: torch.zeros(3, 3)}, "shape"),
        (weights | {"extra.weight": torch.zeros(3)}, "not used"),
    ):
        save_file(broken, file)
        with pytest.raises(CheckpointError, match=word) as caught:
            load(str(directory), "fp32")
        assert str(file) in str(caught.value)
