"""From settings to a plan: which layout, how many bytes, what fits. Torch-free, reads config.json only."""

from __future__ import annotations

from dataclasses import replace

from pydantic_settings import SettingsError

from tokenteller.model.config import ModelConfig, Storage
from tokenteller.model.formats.stored import read_config, stored_format
from tokenteller.model.kv_memory import KVLayout, KVPlan, can_page, in_mib, plan, size
from tokenteller.model.machine import available_memory
from tokenteller.server.settings import ModelSettings, PlanSettings


def storage_of(settings: ModelSettings) -> Storage:
    """What --weights asks for; 'auto' is the form nearest to the file's own that the device has.

    Raises SettingsError where the device has no such form.
    """
    if settings.weights != "auto":
        if settings.weights in ("int8", "int4") and settings.device != "cpu":
            told = f"only on the CPU, not on {settings.device}; use --weights fp16"
            raise SettingsError(f"--weights {settings.weights}: {told}")
        return settings.weights
    form = stored_format(settings.model).weights
    return "fp16" if form in ("int8", "int4") and settings.device != "cpu" else form


def make_plan(settings: ModelSettings) -> tuple[ModelConfig, KVLayout, KVPlan]:
    """Raises ConfigError for a model that is not there or not supported, SettingsError for what contradicts it."""
    config = read_config(settings.model)
    max_context = settings.max_context or config.max_context
    if max_context > config.max_context:
        raise SettingsError(f"--max-context {max_context} is more than the model's own {config.max_context}")
    on_cpu = settings.device == "cpu"
    storage = storage_of(settings)
    kept_in = settings.kv_dtype or ("fp32" if on_cpu else storage)
    layout = KVLayout.of(
        config,
        max_context,
        bytes_per_element=4 if kept_in == "fp32" else 2,
        paged=on_cpu and can_page(),
        chunk=settings.prefill_chunk,
    )
    weight_bytes = config.weight_bytes(storage)
    pool_bytes = _pool_bytes(settings, layout, weight_bytes)
    slots = settings.slots if layout.paged else min(settings.slots, pool_bytes // layout.slot_bytes)
    memory = settings.memory if isinstance(settings, PlanSettings) else None
    made = plan(layout, slots=slots, pool_bytes=pool_bytes, weight_bytes=weight_bytes, by_memory=memory is not None)
    if memory is not None and memory < weight_bytes:
        made = replace(made, advice=_weights_do_not_fit(config, storage, made, memory))
    return config, layout, made


def _weights_do_not_fit(config: ModelConfig, storage: Storage, made: KVPlan, memory: int) -> tuple[str, ...]:
    says = [f"the weights alone need {size(made.weight_bytes)}, the memory is {size(memory)}"]
    halved = config.weight_bytes("fp16")
    if storage == "fp32" and halved < memory:
        says.append(f"with --weights fp16 they need {size(halved)}")
    most = config.num_parameters * memory // made.weight_bytes
    if most >= 10**6:
        says.append(f"a model of at most {most / 1e9:.2g} billion parameters would leave room in {storage}")
    both = made.weight_bytes + made.sequence_bytes
    says.append(f"or give it {size(both)} (--memory {in_mib(both)}): the weights and one sequence")
    return tuple(says)


def _pool_bytes(settings: ModelSettings, layout: KVLayout, weight_bytes: int) -> int:
    if isinstance(settings, PlanSettings) and settings.memory is not None:
        if settings.kv_memory is not None:
            raise SettingsError("--memory and --kv-memory say the same thing twice; give one")
        return max(0, settings.memory - weight_bytes)
    every_slot_full = settings.slots * layout.committed(layout.max_context)
    if settings.kv_memory is not None:
        return min(settings.kv_memory, every_slot_full)
    if settings.device != "cpu":
        return every_slot_full  # a tensor of that size, or the device says that it has not so much
    return min(every_slot_full, max(0, available_memory() - weight_bytes) // 2)


def plan_text(plan: KVPlan) -> str:
    """The plan for people: what a token costs, what the pool holds, and what to change when it does not fit."""
    lines = [
        f"weights     {size(plan.weight_bytes)}",
        f"K/V         {plan.bytes_per_token:,} bytes per token, {plan.bytes_per_element} per element" + _windows(plan),
        f"pool        {size(plan.pool_bytes)} for at most {plan.slots} sequences of at most {plan.max_context:,} tokens"
        + ("" if plan.paged else " (not paged here: every slot costs its full length)"),
        "",
        f"{'tokens':>10} {'K/V each':>12} {'fit at once':>12}",
    ]
    for row in plan.table:
        bound = " (slots)" if row.fit < row.fit_in_bytes else ""
        lines.append(f"{row.tokens:>10,} {size(row.bytes_each):>12} {row.fit:>12,}{bound}")
    lines += ["", *(f"does not fit: {line}" if at == 0 else f"  {line}" for at, line in enumerate(plan.advice))]
    return "\n".join(lines).rstrip()


def _windows(plan: KVPlan) -> str:
    if not plan.windowed_layers:
        return ""
    return f"; {plan.windowed_layers} layers have a window of {plan.window:,} tokens and keep no more"
