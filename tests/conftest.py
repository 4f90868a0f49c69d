"""Fixtures that several test files share."""

from __future__ import annotations

import json
import os

# Small matrices on busy cores: waiting for a second thread costs more than it brings. Read when torch is imported.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# streams take as many steps as they have tokens, unless a test wants it otherwise
os.environ.setdefault("TOKENTELLER_DRAFT_TOKENS", "0")

from collections.abc import Iterator
from pathlib import Path

# processes that tests start import this checkout, too, whatever is installed
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / ".ci/src")

import openai
import pytest
from checkpoints import random_llama
from hypothesis import settings
from live import Live, serve

collect_ignore = ["example"]  # a project of its own: test_testing.py runs it

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint directory, 4 query heads on 2 kv heads."""
    return random_llama(tmp_path_factory.mktemp("rand"))


CHATML = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint directory, named chatty, with a ChatML template."""
    directory = random_llama(tmp_path_factory.mktemp("models") / "chatty", seed=1)
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


@pytest.fixture(scope="module")
def live(rand: Path) -> Iterator[Live]:
    """A server on the random checkpoint with 8 slots."""
    with serve(model=str(rand), slots=8) as server:
        yield server


@pytest.fixture(scope="module")
def chatty_live(chatty: Path) -> Iterator[Live]:
    """A server on the checkpoint with a chat template."""
    with serve(model=str(chatty), slots=8, weights="fp32") as server:
        yield server


@pytest.fixture(scope="module")
def client(chatty_live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chatty_live.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
