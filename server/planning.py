"""From settings to a plan: which number formats, how much memory, how many sequences. Reads no weight; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic_settings import SettingsError

from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.formats.stored import Stored, read_config, stored_format
from tokenteller.model.kv_memory import KVLayout, KVPlan, can_page, in_mib, plan, size
from tokenteller.model.machine import Cpus, available_memory
from tokenteller.server.settings import ModelSettings, PlanSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """What the settings, the model's file and this machine come to. `weights_why`, `pool_why`: for people."""

    config: ModelConfig
    weights: Storage
    weights_why: str
    kv_dtype: Storage
    layout: KVLayout
    kv: KVPlan
    pool_why: str


def make_plan(settings: ModelSettings) -> Plan:
    """Raises ConfigError for a model that is missing or unsupported, SettingsError for settings that contradict it."""
    config, stored = read_config(settings.model), stored_format(settings.model)
    weights, weights_why = choose_weights(settings, stored)
    layout, kv_dtype = _layout(settings, config, stored, weights)
    weight_bytes = config.weight_bytes(weights)
    pool_bytes, pool_why = _pool_bytes(settings, layout, weight_bytes)
    slots = settings.slots if layout.paged else min(settings.slots, pool_bytes // layout.slot_bytes)
    memory = settings.memory if isinstance(settings, PlanSettings) else None
    kv = plan(layout, slots=slots, pool_bytes=pool_bytes, weight_bytes=weight_bytes, shared=memory is not None)
    if memory is not None and memory < weight_bytes:
        kv = replace(kv, advice=_weights_do_not_fit(config, weights, kv, memory))
    return Plan(config, weights, weights_why, kv_dtype, layout, kv, pool_why)


def choose_weights(settings: ModelSettings, stored: Stored) -> tuple[Storage, str]:
    """The weight format and why. Raises SettingsError if the device cannot compute with it."""
    if settings.weights == "auto":
        if stored.weights in ("int8", "int4") and settings.device != "cpu":
            return "fp16", f"{stored.weights} needs the CPU"
        return stored.weights, stored.remark
    if settings.weights in ("int8", "int4") and settings.device != "cpu":
        raise SettingsError(f"--weights {settings.weights}: needs the CPU, not {settings.device}; use --weights fp16")
    return settings.weights, "--weights"


def _layout(settings: ModelSettings, config: ModelConfig, stored: Stored, weights: Storage) -> tuple[KVLayout, Storage]:
    max_context = settings.max_context or config.max_context
    if max_context > config.max_context:
        raise SettingsError(f"--max-context {max_context} is more than the model's own {config.max_context}")
    on_cpu = settings.device == "cpu"
    default: Storage = stored.kv_dtype if on_cpu else weights  # on a GPU, attention wants K and V like the weights
    kv_dtype = default if settings.kv_dtype == "auto" else settings.kv_dtype
    width = 4 if kv_dtype == "fp32" else 2
    paged = on_cpu and can_page()
    return KVLayout.of(config, max_context, width, paged, chunk=settings.prefill_chunk), kv_dtype


def _pool_bytes(settings: ModelSettings, layout: KVLayout, weight_bytes: int) -> tuple[int, str]:
    """Bytes for K and V of all sequences, and what bounds them."""
    if isinstance(settings, PlanSettings) and settings.memory is not None:
        if settings.kv_memory is not None:
            raise SettingsError("--memory and --kv-memory contradict each other; give one")
        return max(0, settings.memory - weight_bytes), "what --memory leaves"
    every_slot_full = settings.slots * layout.committed(layout.max_context)
    if settings.kv_memory is not None and settings.kv_memory < every_slot_full:
        return settings.kv_memory, "--kv-memory"
    if settings.kv_memory is None and settings.device == "cpu":  # a GPU says itself when it has too little
        free = max(0, available_memory() - weight_bytes)
        if free // 2 < every_slot_full:
            return free // 2, f"half of the {size(free)} that the weights leave free"
    return every_slot_full, "every slot at full length"


def _weights_do_not_fit(config: ModelConfig, weights: Storage, kv: KVPlan, memory: int) -> tuple[str, ...]:
    advice = [f"the weights alone need {size(kv.weight_bytes)}, the memory is {size(memory)}"]
    halved = config.weight_bytes("fp16")
    if weights == "fp32" and halved < memory:
        advice.append(f"with --weights fp16 they need {size(halved)}")
    parameters = config.num_parameters * memory // kv.weight_bytes
    if parameters >= 10**6:
        advice.append(f"a model of at most {parameters / 1e9:.2g} billion parameters would leave room in {weights}")
    both = kv.weight_bytes + kv.sequence_bytes
    advice.append(f"or give it {size(both)} (--memory {in_mib(both)}): the weights and one sequence")
    return tuple(advice)


def check_memory(made: Plan) -> None:
    """To be called before weights are read. Raises ValueError if nothing can run, MemoryError if memory is short."""
    if not made.layout.rows_that_fit(made.kv.pool_bytes):
        raise ValueError("; ".join(made.kv.advice))
    needed = made.kv.weight_bytes + made.kv.pool_bytes
    if made.layout.paged and needed > (available := available_memory()):
        parts = f"weights {size(made.kv.weight_bytes)}, K/V pool {size(made.kv.pool_bytes)}"
        raise MemoryError(f"needs {size(needed)} ({parts}), but {size(available)} are available; lower --kv-memory")


def plan_text(made: Plan) -> str:
    """The plan for people: what was chosen and why, what fits, and what to change if a full sequence does not."""
    kv = made.kv
    windows = f"; {kv.windowed_layers} layers keep no more than {kv.window:,} tokens" if kv.windowed_layers else ""
    lines = [
        f"weights     {size(kv.weight_bytes)}, {made.weights} ({made.weights_why})",
        f"K/V         {kv.bytes_per_token:,} bytes per token, {made.kv_dtype}{windows}",
        f"K/V pool    {size(kv.pool_bytes)}: {_at_once(kv)} ({made.pool_why})",
        "",
        f"{'tokens':>10} {'K/V each':>12} {'fit at once':>12}",
    ]
    for row in kv.table:
        bound = " (slots)" if row.fit < row.fit_in_bytes else ""
        lines.append(f"{row.tokens:>10,} {size(row.bytes_each):>12} {row.fit:>12,}{bound}")
    lines += ["", *(f"does not fit: {line}" if at == 0 else f"  {line}" for at, line in enumerate(kv.advice))]
    return "\n".join(lines).rstrip()


def _at_once(kv: KVPlan) -> str:
    full = kv.table[-1].fit
    text = f"{full or 'no'} sequence{'s' * (full > 1)} of {kv.max_context:,} tokens at once"
    all_slots = next((row.tokens for row in reversed(kv.table) if row.fit == kv.slots), None)
    if full < kv.slots and all_slots:
        text += f", or {kv.slots} of {all_slots:,}"
    return text + ("" if kv.paged else "; each slot takes its full length")


def threads_text(threads: int, cpus: Cpus) -> str:
    """threads 1 of 8 CPUs (cgroup quota 1.5)"""
    quota = "" if cpus.quota is None else f" (cgroup quota {cpus.quota:.3g})"
    return f"threads     {threads} of {cpus.online} CPU{'s' * (cpus.online != 1)}{quota}"
