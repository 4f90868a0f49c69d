"""Every family against transformers, eager and in fp32, on the same random files.

Logits agree to 1e-4 in one-shot prefill, in chunks, in decoding and in mixed batches of uneven lengths; greedy tokens
are equal. Random weights have biases and norm weights that are not 0 and 1, so that a forgotten one shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, random_hf

from tokenteller.model.attention import Batch
from tokenteller.model.checkpoint import load
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

TOKENS = [(37 * at + 11 * at * at + 5) % 264 for at in range(200)]


def llama3(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope | {"original_max_position_embeddings": 64} | changes


def yarn(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return rope | changes


# The other families by shapes and scalings that the cases below try on one of them; one decoder computes all.
SHAPES: dict[str, dict[str, Any]] = {
    f"{family} {heads}/{kv_heads} head_dim {dim}": config_of(
        family, hidden_size=72, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim
    )
    for family in ("mistral", "qwen2", "qwen3")
    for heads, kv_heads, dim in ((4, 4, 18), (4, 1, 24), (6, 2, 20))
}
SHAPES |= {
    "mistral llama3": config_of("mistral", rope_parameters=llama3()),
    "qwen2 yarn": config_of("qwen2", rope_parameters=yarn()),
    "qwen3 linear": config_of("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
}

CASES: dict[str, dict[str, Any]] = {
    "llama 4/4": config_of("llama", num_attention_heads=4, num_key_value_heads=4),
    "llama 4/2": config_of("llama"),
    "llama 4/1": config_of("llama", num_key_value_heads=1),
    "llama 6/2": config_of("llama", hidden_size=72, num_attention_heads=6, head_dim=12),
    "llama head_dim 24": config_of("llama", head_dim=24),
    "llama biases": config_of("llama", attention_bias=True, mlp_bias=True),
    "llama tied": config_of("llama", tie_word_embeddings=True),
    "llama theta": config_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama gelu": config_of("llama", hidden_act="gelu"),
    "llama linear": config_of("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama llama3": config_of("llama", rope_parameters=llama3()),
    "llama yarn": config_of("llama", rope_parameters=yarn()),
    "llama yarn attention_factor": config_of("llama", rope_parameters=yarn(attention_factor=0.7)),
    "llama yarn mscale": config_of("llama", rope_parameters=yarn(mscale=1.4, mscale_all_dim=0.6)),
    "llama yarn betas": config_of("llama", rope_parameters=yarn(beta_fast=16.0, beta_slow=2.0, truncate=False)),
    "mistral": config_of("mistral"),
    "mistral window 1": config_of("mistral", sliding_window=1),
    "mistral no window": config_of("mistral", sliding_window=None),
    "qwen2": config_of("qwen2"),
    "qwen2 some windows": config_of(
        "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": config_of("qwen3"),
    "qwen3 6/2 head_dim 24": config_of("qwen3", hidden_size=72, num_attention_heads=6, head_dim=24),
    "qwen3 biases": config_of("qwen3", attention_bias=True, tie_word_embeddings=True),
    "qwen3 layer types": config_of(
        "qwen3",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": config_of("gpt2"),
    **SHAPES,
    "gpt2 gelu untied": config_of("gpt2", activation_function="gelu", tie_word_embeddings=False),
}


@dataclass
class Twin:
    """A checkpoint here and in transformers."""

    directory: Path
    decoder: Decoder
    reference: Any

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits [T, vocab]."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]

    def pool(self) -> KVPool:
        return KVPool(KVLayout.of(self.decoder.config, 256), slots=4)


def twin_of(directory: Path) -> Twin:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    return Twin(directory, load(str(directory), "fp32").decoder, reference)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SHAPES else []) for name in CASES],
)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return twin_of(random_hf(tmp_path_factory.mktemp("twin"), CASES[request.param]))


def forward(decoder: Decoder, pool: KVPool, *spans: tuple[int, list[int], int]) -> torch.Tensor:
    """Logits [N, vocab] of every row; a span is (slot, new tokens, their first position)."""
    tokens = [token for _, new, _ in spans for token in new]
    slots = [slot for slot, new, _ in spans for _ in new]
    positions = [start + at for _, new, start in spans for at in range(len(new))]
    rows = torch.arange(len(tokens))
    return decoder.forward(Batch(torch.tensor(tokens), torch.tensor(slots), torch.tensor(positions), rows), pool)


def greedy(decoder: Decoder, pool: KVPool, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after a prompt, in the last slot."""
    slot, tokens = pool.slots - 1, list(prompt)
    logits = forward(decoder, pool, (slot, tokens, 0))[-1]
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = forward(decoder, pool, (slot, tokens[-1:], len(tokens) - 1))[-1]
    return tokens[len(prompt) :]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_prefill_in_any_chunks_equals_the_reference(twin: Twin) -> None:
    tokens = TOKENS[:50]
    expected = twin.expected(tokens)
    for chunk in (50, 1, 3, 16):
        pool = twin.pool()
        parts = [forward(twin.decoder, pool, (1, tokens[at : at + chunk], at)) for at in range(0, 50, chunk)]
        close(torch.cat(parts), expected)


def test_a_prompt_of_any_length_then_one_token_equals_the_reference(twin: Twin) -> None:
    """Around a window of 8 an error of one row shows here."""
    expected = twin.expected(TOKENS[:41])
    for length in (7, 8, 9, 16, 17, 40):
        pool = twin.pool()
        prefill = forward(twin.decoder, pool, (0, TOKENS[:length], 0))
        decoded = forward(twin.decoder, pool, (0, TOKENS[length : length + 1], length))
        close(torch.cat((prefill, decoded)), expected[: length + 1])


def test_a_mixed_batch_of_uneven_lengths_equals_each_sequence_alone(twin: Twin) -> None:
    """One sequence begins, one is in the middle of its prompt, one decodes far on, one has a single token."""
    a, b, c, d = TOKENS[:13], TOKENS[20:60], TOKENS[60:190], TOKENS[190:191]
    pool = twin.pool()
    forward(twin.decoder, pool, (3, c[:-1], 0))
    forward(twin.decoder, pool, (1, b[:30], 0))
    mixed = forward(twin.decoder, pool, (3, c[-1:], len(c) - 1), (0, a, 0), (2, d, 0), (1, b[30:], 30))
    expected = [twin.expected(c)[-1:], twin.expected(a), twin.expected(d), twin.expected(b)[30:]]
    close(mixed, torch.cat(expected))


def test_thirty_two_greedy_tokens_are_the_references(twin: Twin) -> None:
    prompt = TOKENS[100:111]
    twin.reference.generation_config.eos_token_id = None  # no end before the 32nd
    with torch.inference_mode():
        played = twin.reference.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0, use_cache=False
        )
    assert greedy(twin.decoder, twin.pool(), prompt, 32) == played[0, len(prompt) :].tolist()
