"""Settings: one frozen model from which flags, environment variables and help derive. A flag beats the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FilePath, HttpUrl, SecretStr
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

PREFIX = "TOKENTELLER_"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: Any) -> Any:
    """'2GiB', '512MB', '4096' -> bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB, GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]


def parse_keys(value: Any) -> Any:
    """'key', 'key,key' or '@FILE' with one key a line -> keys. No message ever holds a key."""
    if not isinstance(value, str):
        return value
    keys: list[str] = []
    for part in value.split(","):
        if part.startswith("@"):
            try:
                with open(part[1:], encoding="utf-8") as file:
                    keys += [line.strip() for line in file if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read keys from {part[1:]}: {error}") from None
        else:
            keys.append(part.strip())
    if not keys or not all(re.fullmatch(r"[\x21-\x7e]{8,256}", key) for key in keys):
        raise ValueError("a key has 8 to 256 printable ASCII characters and no space or comma")
    return tuple(keys)


def parse_origins(value: Any) -> Any:
    """'https://a.example,http://localhost:3000' or '*' -> origins."""
    if not isinstance(value, str):
        return value
    origins = [origin.strip() for origin in value.split(",")]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin):
            raise ValueError(f"{origin!r} is no origin; write scheme://host or scheme://host:port, or * for any")
    return tuple(origins)


def parse_counts(value: Any) -> Any:
    """'1,2,4' -> (1, 2, 4)."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def parse_text(value: Any) -> Any:
    """The bytes of an argument that are no UTF-8 come as lone surrogates, which no request can carry."""
    return value.encode(errors="surrogateescape").decode() if isinstance(value, str) else value


ApiKeys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(parse_keys)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_origins)]
Text = Annotated[str, BeforeValidator(parse_text)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], NoDecode, BeforeValidator(parse_counts)]


class ModelSettings(BaseSettings):
    """What decides memory: the model, how it is stored, and the pool."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_prefix_target="all",  # aliases, too
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_exit_on_error=False,  # it raises, and main() tells
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, where empty is unset: so compose files leave a setting out."""
        return init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True)

    model: str = Field(
        "toy", description="'toy', 'smollm2', a checkpoint directory, a .gguf file, or a name on the Hugging Face hub"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model is computed")
    weights: Literal["fp32", "fp16", "bf16", "int8", "int4", "auto"] = Field(
        "fp16",
        description="how weights are stored; int8 and int4, the fastest, round activations too and are for the CPU "
        "only; auto is the form nearest to the file's own",
    )
    slots: int = Field(64, ge=1, le=4096, description="sequences that run at once at most")
    max_context: int | None = Field(None, ge=2, description="longest sequence in tokens (default: the model's own)")
    kv_memory: Bytes | None = Field(
        None,
        description="bytes for K and V, e.g. 512MiB (default: all slots at full length, at most half of what is free)",
    )
    kv_dtype: Literal["fp32", "fp16"] | None = Field(
        None,
        description="what K and V are kept in; fp16 takes half the memory (default: fp32 on the CPU, else as weights)",
    )
    prefill_chunk: int = Field(128, ge=1, le=4096, description="most prompt tokens computed in one step")


class ServeSettings(ModelSettings):
    """Start the server."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    threads: int | None = Field(
        None, ge=1, description="threads for the maths (default: the CPUs this process may use)"
    )
    admission: Literal["peak", "reserve", "learned"] = Field(
        "peak",
        description="lend by the peak of what all can come to need at any step, reserve everyone's maximum, or lend "
        "beyond the peak what clients as a rule do not use",
    )
    token_gap: int | None = Field(
        None,
        ge=1,
        description="wished gap in ms between tokens while prompts are computed (default: half a step more for each)",
    )
    speculate: int = Field(
        8,
        ge=0,
        le=64,
        description="most tokens guessed per stream and step, from its prompt and text so far, where it pays; 0: none",
    )
    bypass_limit: int = Field(4, ge=0, description="times that a waiting request may be passed by one behind it")
    queue_limit: int = Field(256, ge=1, description="requests that may wait; one more gets 429")
    queue_tokens: int = Field(2**20, ge=1, description="prompt tokens that may wait; a request beyond gets 429")
    max_body: Bytes = Field(2**20, description="largest request body in bytes; more gets 413")
    stream_buffer: int = Field(256, ge=1, description="tokens a client may lag behind before its sequence is held")
    slow_reader_timeout: float = Field(30.0, gt=0, description="seconds a sequence is held before its stream is ended")
    shutdown_timeout: int = Field(30, ge=0, description="seconds that running streams get to finish after SIGTERM")
    log_format: Literal["plain", "json"] = Field("plain", description="how log lines are written, on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    explain: CliImplicitFlag[bool] = Field(False, description="log each decision of the scheduler with its formula")
    explain_json: CliImplicitFlag[bool] = Field(False, description="the same, and all log lines as JSON")
    api_key: ApiKeys = Field(
        (), description="keys that clients must send; repeat it, or @FILE with one a line (default: none is asked for)"
    )
    cors_origin: Origins = Field(
        (), description="web origins that may call; repeat it, or * for any (never with credentials; default: none)"
    )
    ssl_certfile: FilePath | None = Field(None, description="certificate chain for TLS, PEM")
    ssl_keyfile: FilePath | None = Field(None, description="private key of the certificate, PEM")


class PlanSettings(ModelSettings):
    """Print what fits, from config.json alone."""

    memory: Bytes | None = Field(
        None,
        description="memory for weights and K/V together, instead of --kv-memory; the process takes some 350 MiB more",
    )
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print JSON")


class BenchSettings(ModelSettings):
    """Measure the model on this machine, without HTTP."""

    streams: Counts = Field((1, 2, 4, 8, 16, 32), description="how many sequences decode at once")
    context: int = Field(256, ge=1, description="tokens that each has before it")
    steps: int = Field(32, ge=4, description="steps measured for each")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    threads: int | None = Field(None, ge=1, description="threads for the maths (default: as serve)")
    profile: CliImplicitFlag[bool] = Field(
        False, description="beside the speed also its parts, the floor, growth with context, memory and start"
    )
    json_: CliImplicitFlag[bool] = Field(False, alias="json", description="print JSON")


class GenerateSettings(ModelSettings):
    """Stream an answer to the terminal, from a running server or from one made for this answer."""

    model_config = SettingsConfigDict(cli_prog_name="tokenteller generate")

    prompt: CliPositionalArg[Text] = Field(description="the text to continue")
    url: HttpUrl | None = Field(None, description="address of a running server (default: load the model here)")
    api_key: ApiKeys = Field((), description="the key that the server asks for, or @FILE")
    max_tokens: int | None = Field(None, description="tokens to generate")
    temperature: float = Field(1.0, description="0 is greedy")
    seed: int | None = Field(None, description="same seed, same text")


class ChatSettings(ModelSettings):
    """Talk to the model in the terminal, on a running server or loaded for this conversation."""

    model_config = SettingsConfigDict(cli_prog_name="tokenteller chat")

    url: HttpUrl | None = Field(None, description="address of a running server (default: load the model here)")
    api_key: ApiKeys = Field((), description="the key that the server asks for, or @FILE")
    system: Text | None = Field(None, description="what the model is told before the conversation")
    max_tokens: int | None = Field(None, ge=1, description="longest answer in tokens (default: 1024, or what fits)")
    temperature: float | None = Field(None, description="0 is greedy (default: the server's)")
    seed: int | None = Field(None, description="same seed, same answers")


def check_environment(names: Iterable[str]) -> None:
    """Raises SettingsError for a TOKENTELLER_ variable that no command reads."""
    commands = (ServeSettings, PlanSettings, BenchSettings, GenerateSettings, ChatSettings)
    known = {field.strip("_").upper() for command in commands for field in command.model_fields}
    for name in names:
        prefix, setting = name.upper()[: len(PREFIX)], name.upper()[len(PREFIX) :]
        if prefix == PREFIX and setting not in known:
            remedy = "".join(f"; did you mean {PREFIX}{one}?" for one in get_close_matches(setting, known, n=1))
            if setting.startswith(("SERVICE_", "PORT_")):
                remedy = "; Kubernetes makes it of a Service of that name, unless the pod has enableServiceLinks: false"
            raise SettingsError(f"{name}: no such setting{remedy}")
