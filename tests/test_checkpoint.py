"""Loading: every tensor is used or named, and what cannot be loaded is one line that names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, config_of, random_hf, random_llama, tape
from live import serve
from safetensors.torch import load_file, save_file
from test_parity import TOKENS, close, forward, twin_of

from model.checkpoint import CheckpointError, load
from model.kv_memory import KVLayout
from model.kv_pool import KVPool

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
    with serve(model=str(tape(tmp_path, DIGITS + "abcd")), slots=2, weights=weights) as server:
        for prompt, text in (("x", "0123"), ("xyz", "2345"), ("hello", "4567")):
            assert server.text(prompt, max_tokens=4, temperature=0) == text
        assert server.text("x" * 60, max_tokens=4, temperature=0) == "9abc"
        assert server.text("x" * 63, max_tokens=1, temperature=0) == "c"
        assert server.text("x", max_tokens=63, temperature=0) == DIGITS + "abc"
        assert server.post(prompt="x" * 60, max_tokens=5).status_code == 422


def test_a_gpt2_file_without_its_usual_prefix_and_with_mask_buffers_is_the_same_model(tmp_path: Path) -> None:
    directory = random_hf(tmp_path, config_of("gpt2"))
    twin = twin_of(directory)
    weights = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    renamed |= {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(renamed, directory / "model.safetensors")
    again = load(str(directory), "fp32").decoder
    close(forward(again, twin.pool(), (0, TOKENS[:20], 0)), twin.expected(TOKENS[:20]))


def edited(directory: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """Replaces, adds or (None) drops tensors of a single-file checkpoint, and changes keys of its config."""
    file = directory / "model.safetensors"
    weights = load_file(file) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in weights.items() if changes.get(name, tensor) is not None}, file)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


class TestTiedHead:
    """Fault 107: a head that is missing, doubled or left over."""

    def test_tied_without_a_head_in_the_file(self, tmp_path: Path) -> None:
        directory = random_llama(tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(directory / "model.safetensors")
        self.equals_reference(directory)

    def test_tied_with_an_equal_head_in_the_file(self, tmp_path: Path) -> None:
        directory = random_llama(tmp_path, tie_word_embeddings=True)
        embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
        self.equals_reference(edited(directory, {"lm_head.weight": embedding.clone()}))

    def test_tied_with_another_head_in_the_file_uses_the_files_head_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        directory = random_llama(tmp_path, tie_word_embeddings=True)
        self.equals_reference(edited(directory, {"lm_head.weight": torch.randn(VOCAB, 64)}))
        assert "lm_head.weight" in caplog.text

    def test_untied_with_a_head(self, tmp_path: Path) -> None:
        self.equals_reference(random_llama(tmp_path, tie_word_embeddings=False))

    def test_untied_without_a_head_is_refused_by_name(self, tmp_path: Path) -> None:
        directory = edited(random_llama(tmp_path), {"lm_head.weight": None})
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'lm_head\.weight' is missing"):
            load(str(directory), "fp32")

    def equals_reference(self, directory: Path) -> None:
        twin = twin_of(directory)
        close(forward(twin.decoder, twin.pool(), (0, TOKENS[:20], 0)), twin.expected(TOKENS[:20]))
