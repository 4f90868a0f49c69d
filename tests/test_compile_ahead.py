"""Compiling before the weights are read: for the types the decoder will use, and once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, random_hf
from numba import typeof

from tokenteller.model.attention import Batch
from tokenteller.model.checkpoint import load
from tokenteller.model.config import Storage
from tokenteller.model.formats.stored import read_config
from tokenteller.model.kernels import ahead
from tokenteller.model.kernels.forward import forward_for
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool

# Compiles the toy's forward and prints what worker processes have compiled.
PROGRAM = """
import sys
from tokenteller.model.formats.stored import read_config
from tokenteller.model.kernels import compile_ahead
from tokenteller.model.kernels.workers import workers
compile_ahead(read_config("toy"), "fp32", "fp32")
assert "torch" not in sys.modules
for job in list(workers._done):  # the step, and then the kernels that it calls
    workers.wait(job)
print(sorted(name for name, _ in workers._done))
for job in list(workers._done):
    workers.wait(job)
"""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("weights", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_the_types_are_those_of_the_decoder(tmp_path: Path, family: str, weights: Storage) -> None:
    directory = random_hf(tmp_path, config_of(family))
    config, width = read_config(str(directory)), 4 if weights == "fp32" else 2
    decoder = load(str(directory), weights).decoder
    pool = KVPool(KVLayout.of(config, config.max_context, width), 1)
    seen = []
    decoder._step = lambda *arguments: seen.append(tuple(map(typeof, arguments))) or torch.zeros(1, 1).numpy()
    row = torch.zeros(1, dtype=torch.int64)
    decoder.forward(Batch(row, row, row, row), pool)
    kv_dtype: Storage = "fp32" if weights == "fp32" else "fp16"
    layers, model = ahead._layers(config, weights), ahead._model(config, weights)
    assert seen == [ahead.forward_types(layers, model, kv_dtype)]
    assert forward_for(layers, model) is forward_for(decoder._layers, decoder._model)


def test_everything_is_compiled_once_without_torch(tmp_path: Path) -> None:
    def run() -> tuple[str, str]:
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    out, error = run()
    assert "'attend_runs'" in out and "'forward.plain.floats.floats.floats.floats.floats'" in out
    assert error.startswith("compiling for this CPU, once (about ") and error.count("\n") == 1
    files = sorted((tmp_path / "tokenteller").iterdir())
    assert len(files) == out.count("'") // 2
    assert run() == ("[]\n", "")
