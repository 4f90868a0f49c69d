"""Settings: one frozen model per command, from which flags, environment variables and help derive.

A flag beats the environment; an empty variable counts as not set.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, FilePath, HttpUrl
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tokenteller.server.setting_types import ApiKeys, Bytes, Counts, Origins, Text

PREFIX = "TOKENTELLER_"

GROUPS = {
    "model": ("model", "served_model_name", "weights", "kv_dtype", "device", "threads"),
    "memory": ("slots", "max_context", "kv_memory", "prefault"),
    "limits": ("queue_limit", "max_body", "shutdown_timeout", "slow_reader_timeout"),
    "network": ("host", "port", "api_key", "cors_origin", "ssl_certfile", "ssl_keyfile"),
    "advanced": (
        "admission",
        "prefill_chunk",
        "token_gap",
        "draft_tokens",
        "queue_tokens",
        "log_format",
        "log_level",
        "explain",
    ),
}

REMOVED = {
    "--speculate": "is now --draft-tokens",
    "--explain-json": "is now --explain with --log-format json",
    "--bypass-limit": "is gone: a waiting request can be passed 4 times",
    "--stream-buffer": "is gone: a client may lag behind by 256 tokens",
}


class ModelSettings(BaseSettings):
    """What decides how much memory is needed: the model, its number formats, and how many sequences of which length."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_prefix_target="all",  # aliases, too
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True)

    model: str = Field(
        "toy", description="'toy', 'smollm2', a checkpoint folder, a .gguf file, or a name on the Hugging Face hub"
    )
    weights: Literal["auto", "fp32", "fp16", "bf16", "int8", "int4"] = Field(
        "auto",
        description="weight format; auto: as the model's own file has it. int8 and int4 are the fastest, need the CPU, "
        "and round activations too",
    )
    kv_dtype: Literal["auto", "fp32", "fp16"] = Field(
        "auto",
        description="number format of K and V; fp16 halves their memory. auto: fp16 where the model's own numbers have "
        "16 bits or fewer",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    slots: int = Field(64, ge=1, le=4096, description="most sequences that run at once")
    max_context: int | None = Field(
        None, ge=2, description="most tokens of a sequence, prompt and answer together (default: the model's limit)"
    )
    kv_memory: Bytes | None = Field(
        None,
        description="memory for K and V of all sequences, e.g. 512MiB (default: enough for every slot at full length, "
        "but at most half of what the weights leave free)",
    )
    prefill_chunk: int = Field(128, ge=1, le=4096, description="most prompt tokens computed in one step")


class LoadSettings(ModelSettings):
    """What a command needs in addition that loads the model."""

    threads: int | None = Field(None, ge=1, description="threads that compute (default: the CPUs this process may use)")


class ServeSettings(LoadSettings):
    """Start the server."""

    served_model_name: str | None = Field(
        None, min_length=1, description="the model's name in the API (default: the last part of --model)"
    )
    prefault: bool = Field(
        False, description="touch all memory for K and V once at start, so that a shortage shows then; 1 s per GiB"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: ApiKeys = Field(
        (),
        description="key that clients must send; repeat it for several, or @FILE with one per line (default: no key "
        "is needed)",
    )
    cors_origin: Origins = Field(
        (),
        description="web origin whose pages may call this server; repeat it for several, * for any, never with "
        "credentials (default: none)",
    )
    ssl_certfile: FilePath | None = Field(None, description="certificate chain for TLS, PEM")
    ssl_keyfile: FilePath | None = Field(None, description="private key of the certificate, PEM")
    queue_limit: int = Field(256, ge=1, description="most requests that wait for a slot; one more gets 429")
    queue_tokens: int = Field(2**20, ge=1, description="most prompt tokens that wait; a request beyond gets 429")
    max_body: Bytes = Field(2**20, description="largest request body in bytes; a larger one gets 413")
    shutdown_timeout: int = Field(30, ge=0, description="seconds that running requests get to finish after SIGTERM")
    slow_reader_timeout: float = Field(
        30.0, gt=0, description="seconds a client may stop reading before its stream is ended"
    )
    admission: Literal["peak", "reserve", "learned"] = Field(
        "peak",
        description="which requests start: peak, those whose joint highest demand fits at every step; reserve, those "
        "whose maxima fit together; learned, beyond the peak by what clients usually leave unused",
    )
    token_gap: int | None = Field(
        None,
        ge=1,
        description="target gap in ms between tokens while prompts are computed (default: half a step more for each "
        "prompt)",
    )
    draft_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="most draft tokens per stream and step, looked up in its own text, where that pays; 0: none",
    )
    log_format: Literal["plain", "json"] = Field("plain", description="format of the log lines on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    explain: bool = Field(False, description="log every scheduling decision with its formula")


class PlanSettings(ModelSettings):
    """Show how many sequences fit in memory, before any weight is read."""

    memory: Bytes | None = Field(
        None,
        description="memory for weights and K/V together, in place of --kv-memory; the process needs 350 MiB more",
    )
    json_: bool = Field(False, alias="json", description="print JSON")


class BenchSettings(LoadSettings):
    """Measure the model on this machine, without HTTP."""

    streams: Counts = Field((1, 2, 4, 8, 16, 32), description="how many sequences decode at once")
    context: int = Field(256, ge=1, description="tokens that each sequence has before the first step")
    steps: int = Field(32, ge=4, description="steps measured for each")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    profile: bool = Field(
        False, description="also show the parts of a step, its lower bound, growth with context, memory and start"
    )
    json_: bool = Field(False, alias="json", description="print JSON")


class GenerateSettings(LoadSettings):
    """Stream one answer to the terminal, from a running server or from one started for it."""

    prompt: Text = Field(description="the text to continue")
    url: HttpUrl | None = Field(None, description="address of a running server (default: load the model here)")
    api_key: ApiKeys = Field((), description="the key that the server asks for, or @FILE")
    max_tokens: int | None = Field(None, description="most tokens to generate")
    temperature: float = Field(1.0, description="0 is greedy")
    seed: int | None = Field(None, description="the same seed gives the same text")


class ChatSettings(LoadSettings):
    """Talk to the model in the terminal, on a running server or loaded for this conversation."""

    url: HttpUrl | None = Field(None, description="address of a running server (default: load the model here)")
    api_key: ApiKeys = Field((), description="the key that the server asks for, or @FILE")
    system: Text | None = Field(None, description="what the model is told before the conversation")
    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer (default: 1024, or what fits)")
    temperature: float | None = Field(None, description="0 is greedy (default: the server's)")
    seed: int | None = Field(None, description="the same seed gives the same answers")


COMMANDS: tuple[type[ModelSettings], ...] = (
    ServeSettings,
    PlanSettings,
    BenchSettings,
    GenerateSettings,
    ChatSettings,
)


def check_environment(names: Iterable[str]) -> None:
    """Raises SettingsError for a TOKENTELLER_ variable that no command reads."""
    known = {field.strip("_").upper() for command in COMMANDS for field in command.model_fields}
    for name in names:
        prefix, setting = name.upper()[: len(PREFIX)], name.upper()[len(PREFIX) :]
        if prefix == PREFIX and setting not in known:
            raise SettingsError(f"{name}: no such setting{_remedy(setting, known)}")


def _remedy(setting: str, known: Iterable[str]) -> str:
    flag = "--" + setting.lower().replace("_", "-")
    if flag in REMOVED:
        return f"; {flag} {REMOVED[flag]}"
    if setting.startswith(("SERVICE_", "PORT_")):
        return "; Kubernetes sets it for a Service of that name, unless the pod has enableServiceLinks: false"
    return "".join(f"; did you mean {PREFIX}{close}?" for close in get_close_matches(setting, known, n=1))
