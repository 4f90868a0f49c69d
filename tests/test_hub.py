"""Names of the Hugging Face hub, against a small hub of our own: what is downloaded, kept, and said when it fails."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import random_llama, to_gguf
from gguf import GGMLQuantizationType as Kind
from hub import COMMIT, Hub, serve_hub

from tokenteller.model.formats.errors import ConfigError
from tokenteller.model.formats.hub import choose_gguf, needed_files

SMALL = ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A safetensors repository with files nobody needs, and one with GGUF files only."""
    at = tmp_path_factory.mktemp("repositories")
    plain = random_llama(at / "plain")
    (plain / "onnx").mkdir()
    for useless in (
        "pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "consolidated.safetensors",
        "README.md",
    ):
        (plain / useless).write_bytes(b"useless")
    (at / "gguf").mkdir()
    for name, kind in (("Q8_0", Kind.Q8_0), ("Q4_K_M", Kind.Q4_0), ("f16", Kind.F16)):
        to_gguf(plain, at / "gguf" / f"small-{name}.gguf", kind)
    return {"plain": plain, "gguf": at / "gguf"}


@pytest.fixture
def hub(folders: dict[str, Path]) -> Iterator[Hub]:
    with serve_hub(**folders) as hub:
        yield hub


def run(code: str, hub: Hub, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since huggingface_hub reads its settings when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_UPDATE_CHECK": "1"} | environment
    command = [sys.executable, *(["-c", code] if "(" in code else ["-m", "tokenteller.server", *code.split()])]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | own)


def locate(model: str, hub: Hub, cache: Path, weights: bool = True, **environment: str) -> Path:
    code = f"from tokenteller.model.formats.hub import locate; print(locate({model!r}, {weights}))"
    done = run(code, hub, cache, **environment)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def refused(model: str, hub: Hub, cache: Path, **environment: str) -> str:
    """The one line that `tokenteller plan` prints."""
    done = run(f"plan --model {model}", hub, cache, **environment)
    (line,) = [line for line in done.stderr.splitlines() if line and "Fetching" not in line]  # not the progress bar's
    assert done.returncode == 1 and line.startswith(f"tokenteller: model '{model}'")
    return line


def test_of_a_safetensors_repository_only_what_is_read_is_downloaded_and_once(hub: Hub, tmp_path: Path) -> None:
    found = locate("me/plain", hub, tmp_path)
    assert found.name == COMMIT and hub.downloads() == [*SMALL[:1], "model.safetensors", *SMALL[1:]]
    assert (found / "model.safetensors").read_bytes() == (
        hub.repositories["me/plain"] / "model.safetensors"
    ).read_bytes()
    sent = hub.sent
    assert locate("me/plain", hub, tmp_path) == found and hub.sent == sent


def test_a_plan_needs_the_config_alone(hub: Hub, tmp_path: Path) -> None:
    done = run("plan --model me/plain", hub, tmp_path)
    assert done.returncode == 0 and "weights" in done.stdout
    assert hub.downloads() == ["config.json"]


def test_a_served_model_is_called_by_the_name_it_was_asked_for(hub: Hub, tmp_path: Path) -> None:
    code = "from tokenteller.model.checkpoint import load; print(load('me/gguf:q8_0', 'int8').name)"
    done = run(code, hub, tmp_path)
    assert done.stdout == "me/gguf:q8_0\n", done.stderr


@pytest.mark.parametrize(("tag", "file"), [("", "Q4_K_M"), (":Q8_0", "Q8_0"), (":q8_0", "Q8_0"), (":F16", "f16")])
def test_a_gguf_repository_gives_one_file_by_its_quantisation(hub: Hub, tmp_path: Path, tag: str, file: str) -> None:
    found = locate(f"me/gguf{tag}", hub, tmp_path)
    assert found.name == f"small-{file}.gguf" and hub.downloads() == [found.name]


def test_a_cut_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    """huggingface_hub resumes at the last 10 MiB that it wrote."""
    whole = random.Random(0).randbytes(24 * 2**20)
    repository = hub.repositories["me/large"] = tmp_path / "large"
    repository.mkdir()
    (repository / "model.safetensors").write_bytes(whole)
    hub.cut_after["model.safetensors"] = 15 * 2**20
    found = locate("me/large", hub, tmp_path / "cache")
    assert (found / "model.safetensors").read_bytes() == whole
    assert hub.sent == len(whole) + 5 * 2**20


@pytest.mark.parametrize("model", ["me/plain", "me/gguf:Q8_0"])
def test_what_was_downloaded_serves_without_a_network(hub: Hub, tmp_path: Path, model: str) -> None:
    found = locate(model, hub, tmp_path)
    asked = len(hub.asked)
    assert locate(model, hub, tmp_path, HF_HUB_OFFLINE="1") == found and len(hub.asked) == asked
    assert locate(model, hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == found  # nobody listens there
    hub.broken = True
    assert locate(model, hub, tmp_path) == found


class TestErrors:
    def test_an_unknown_repository(self, hub: Hub, tmp_path: Path) -> None:
        line = refused("me/nothing", hub, tmp_path)
        assert f"neither a local path nor a repository of {hub.url}; if it is private, set HF_TOKEN" in line

    def test_a_gated_repository_opens_with_a_token(self, hub: Hub, tmp_path: Path) -> None:
        hub.gated.add("me/plain")
        assert f"is gated: request access on {hub.url}/me/plain and set HF_TOKEN" in refused("me/plain", hub, tmp_path)
        locate("me/plain", hub, tmp_path, HF_TOKEN="letmein")

    def test_offline_and_not_cached(self, hub: Hub, tmp_path: Path) -> None:
        line = refused("me/plain", hub, tmp_path, HF_HUB_OFFLINE="1")
        assert "is not in the local cache, and HF_HUB_OFFLINE forbids a download" in line and not hub.asked

    def test_offline_with_the_config_but_not_the_weights(self, hub: Hub, tmp_path: Path) -> None:
        locate("me/plain", hub, tmp_path, weights=False)
        code = "from tokenteller.model.checkpoint import load; load('me/plain', 'fp32')"
        last = run(code, hub, tmp_path, HF_HUB_OFFLINE="1").stderr.splitlines()[-1]
        assert last.endswith("is not in the local cache, and HF_HUB_OFFLINE forbids a download; start once without")

    def test_a_hub_that_refuses_the_connection(self, hub: Hub, tmp_path: Path) -> None:
        line = refused("me/plain", hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
        assert "cannot be downloaded from http://127.0.0.1:9 (ConnectError: " in line and "Connection refused" in line

    def test_a_hub_that_is_broken(self, hub: Hub, tmp_path: Path) -> None:
        hub.broken = True
        assert f"{hub.url} answered with an error" in refused("me/plain", hub, tmp_path)

    def test_a_quantisation_that_is_not_there(self, hub: Hub, tmp_path: Path) -> None:
        line = refused("me/gguf:Q5_K_M", hub, tmp_path)
        assert (
            "none of its GGUF files is Q5_K_M; name one as me/gguf:QUANTISATION, of: small-Q4_K_M, small-Q8_0" in line
        )

    def test_a_quantisation_of_a_repository_without_gguf(self, hub: Hub, tmp_path: Path) -> None:
        assert "the repository has no GGUF files; leave out ':Q4_K_M'" in refused("me/plain:Q4_K_M", hub, tmp_path)


class TestChoosing:
    """Names as repositories have them."""

    def test_all_parts_of_a_split_file_belong_together(self) -> None:
        parts = [f"Q8_0/big-Q8_0-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
        assert choose_gguf([*parts, "big-Q4_K_M.gguf", "mmproj-big-Q8_0.gguf"], "q8_0", "a/b") == parts

    def test_a_tag_is_a_whole_word(self) -> None:
        files = ["m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "m.Q4_0_4_4.gguf", "m.Q4_0.gguf"]
        assert choose_gguf(files, "Q4_0", "a/b") == ["m.Q4_0.gguf"]
        with pytest.raises(ConfigError, match=r"none of its GGUF files is Q4_K; .*: m.Q4_0, m.Q4_0_4_4, m.Q4_K_M"):
            choose_gguf(files, "Q4_K", "a/b")

    def test_without_a_tag_and_without_q4_k_m_the_only_one_or_an_error(self) -> None:
        assert choose_gguf(["m-IQ2_S.gguf"], None, "a/b") == ["m-IQ2_S.gguf"]
        with pytest.raises(ConfigError, match="it has several GGUF files; name one as a/b:QUANTISATION, of: m-a, m-b"):
            choose_gguf(["m-a.gguf", "m-b.gguf"], None, "a/b")

    def test_shards_are_needed_where_there_is_no_single_file(self) -> None:
        shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert set(shards) <= set(needed_files([*shards, "consolidated.safetensors"]))
        assert not set(shards) & set(needed_files([*shards, "model.safetensors"]))
