"""`python -m tokenteller.model.explain`: what it shows a learner is what the decoder computes, for every family."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, random_hf
from test_parity import TOKENS, close, forward

from tokenteller.model import explain
from tokenteller.model.checkpoint import Checkpoint, load
from tokenteller.model.decoder import Decoder
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

TEXT = "Of forty letters and one, no more, is it"
CONFIGS = {family: config_of(family) for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2")}
CONFIGS["some windows"] = config_of(
    "qwen3",
    use_sliding_window=True,
    sliding_window=8,
    max_window_layers=1,
    layer_types=["full_attention", "sliding_attention"],
)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load(str(random_hf(tmp_path_factory.mktemp("explain"), CONFIGS[request.param])), "fp32")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["explain", *arguments])
    return explain.main()


@torch.inference_mode()
def test_what_is_shown_is_what_the_decoder_computes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of both layers: those of the second come from all that is shown of the first."""
    shown: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(explain, "show", lambda name, tensor, meaning: shown.update({name: tensor}))
    explain.explain(checkpoint, TEXT)
    decoder, ids = checkpoint.decoder, checkpoint.tokenizer.encode(TEXT)
    pool = KVPool(KVLayout.of(decoder.config, 256), slots=1)
    close(shown["logits"], forward(decoder, pool, (0, ids, 0))[-1])
    first, second = decoder.blocks
    key = shown.get("rotated k", shown["k"])
    close(key.transpose(0, 1), pool.keys(0, 0, len(ids)))
    close(shown["v"].transpose(0, 1), pool.values(0, 0, len(ids)))
    x = shown.get("x + position", shown["x"]) + shown["projected"]
    x = x + first.mlp(first.mlp_norm(x))
    close(second.attention.project(second.attention_norm(x))[2].transpose(0, 1), pool.values(0, 1, len(ids)))
    assert ("rotated k" in shown) == (decoder.config.rope is not None)
    assert ("x + position" in shown) == (decoder.config.rope is None)


def test_what_is_said_of_memory_adds_up(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    explain.explain(checkpoint, TEXT)
    out = capsys.readouterr().out
    windows = [window or 1000 for window in checkpoint.config.windows or (None, None)]
    rows, each = len(checkpoint.tokenizer.encode(TEXT)), 2 * checkpoint.config.num_kv_heads * 16 * 4
    assert f"{2 * each:,} bytes per token\n" in out
    total = f"{each * sum(min(rows, window) for window in windows):,} bytes"
    said = {
        (1000, 1000): f" x {rows} rows = {total}\n",
        (8, 8): f" (2 layers x 8 rows) x {each} bytes in each layer = {total}\n",
        (1000, 8): f" (1 layers x {rows} rows + 1 layers x 8 rows) x {each} bytes in each layer = {total}\n",
    }
    assert said[windows[0], windows[1]] in out
    assert ("this layer has a window of 8 rows" in out) == (windows[0] == 8)
    figures = [re.search(rf"{name} +([\d,]+) bytes", out) for name in ("committed", "kernel")]
    assert figures[0] and figures[1] and figures[0][1] == figures[1][1]


def test_pages_of_a_long_text_are_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 512 floats, two a page: a window of 8 leaves most of them behind, but not within the one step."""
    config = config_of("mistral", head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    explain.explain(load(str(random_hf(tmp_path, config)), "fp32"), "a" * 99)
    pages = 4 * 4096 * -(-99 // 2)
    assert re.findall(r"(?:committed|kernel) +([\d,]+) bytes", capsys.readouterr().out) == [f"{pages:,}"] * 2


@pytest.mark.parametrize("way", [explain.without_cache, explain.with_concatenated_cache, explain.with_pool])
@torch.inference_mode()
def test_each_way_that_is_timed_computes_the_model(
    way: Callable[[Decoder, int], list[float]], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []

    def played(tokens: int, step: Callable[[list[int]], torch.Tensor]) -> list[float]:
        logits.extend(step(TOKENS[: at + 1]) for at in range(tokens))
        return []

    monkeypatch.setattr(explain, "timed", played)
    way(checkpoint.decoder, 30)
    pool = KVPool(KVLayout.of(checkpoint.config, 256), slots=1)
    close(torch.cat(logits), forward(checkpoint.decoder, pool, (0, TOKENS[:30], 0)))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["a" * 257], 1, "the text has 257 tokens; it must have 1..256, the model's context"),
        ([""], 1, "the text has 0 tokens; it must have 1..256, the model's context"),
        (["--compare", "--tokens", "257"], 1, "--tokens must be in 1..256, the model's context"),
        (
            ["a\udcff"],
            2,
            "the text is not UTF-8: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte",
        ),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    arguments: list[str], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    directory = random_hf(tmp_path, config_of("gpt2", bos_token_id=None))
    capsys.readouterr()
    (directory / "tokenizer_config.json").write_text("{}")
    assert run(monkeypatch, *arguments, "--model", str(directory)) == code
    assert capsys.readouterr().err == f"explain: {told}\n"


def test_a_text_as_long_as_the_context_is_explained(rand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = load(str(rand), "fp32")
    explain.explain(checkpoint, "a" * (256 - len(checkpoint.tokenizer.encode(""))))
    assert "is the last: the context of 256 rows is full." in capsys.readouterr().out
