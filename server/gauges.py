"""The gauges: levels that are read when /metrics is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenteller.model.kv_memory import PAGE_BYTES, KVLayout

WAITING_FOR = ("slot", "kv_bytes", "prefill")


@dataclass(frozen=True, slots=True)
class Levels:
    """The values of all gauges at one moment."""

    running: int
    waiting: dict[str, int]  # by what they wait for
    held: int
    slots: dict[str, int]  # by state
    budget_bytes: int
    committed_bytes: int
    formula_bytes: int
    kernel_bytes: int
    kept_bytes: int
    peak_demand_bytes: int
    healthy: bool
    draining: bool
    tasks: int = 0
    log_lines_dropped: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class LevelsCollector(Collector):
    """Reads the levels at each scrape."""

    def __init__(self, read: Callable[[], Levels], model: str, info: dict[str, str], layout: KVLayout) -> None:
        self._read, self._model, self._info, self._layout = read, model, info, layout

    def describe(self) -> Iterable[Metric]:
        return []  # else registering would already read the levels

    def collect(self) -> Iterator[Metric]:
        levels = self._read()
        yield from self._vllm(levels)
        yield from self._memory(levels)
        yield InfoMetricFamily("tokenteller_build", "Version, model and weight format", value=self._info)
        yield self._by("tokenteller_waiting", "Waiting sequences by what they wait for", "reason", levels.waiting)
        yield self._by("tokenteller_slots", "Slots by state", "state", levels.slots)
        yield self._gauge("tokenteller_held", "Running sequences paused for a slow reader", levels.held)
        yield self._gauge("tokenteller_healthy", "1 while the engine is neither dead nor stuck", int(levels.healthy))
        yield self._gauge("tokenteller_draining", "1 once shutdown has begun", int(levels.draining))
        yield self._gauge("tokenteller_tasks", "Event loop tasks: one per client, and a few", levels.tasks)
        dropped = CounterMetricFamily("tokenteller_log_lines_dropped", "Log lines that could not be written")
        dropped.add_metric([], levels.log_lines_dropped)
        yield dropped

    def _vllm(self, levels: Levels) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that have a slot", levels.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting for a slot", sum(levels.waiting.values()))
        usage = levels.committed_bytes / levels.budget_bytes
        yield self._gauge("vllm:kv_cache_usage_perc", "Committed share of the pool, 0 to 1", usage)
        yield self._cache_config(levels.budget_bytes)
        for name, help, value in (
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens", levels.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", levels.accepted_tokens),
        ):
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

    def _memory(self, levels: Levels) -> Iterator[Metric]:
        yield self._by(
            "tokenteller_kv_bytes",
            "K/V bytes in use: by the formula, by the ledger (whole pages), by the kernel",
            "by",
            {"formula": levels.formula_bytes, "ledger": levels.committed_bytes, "kernel": levels.kernel_bytes},
        )
        yield self._gauge("tokenteller_kv_budget_bytes", "K/V bytes the pool may use", levels.budget_bytes)
        yield self._gauge("tokenteller_prefix_kept_bytes", "K/V bytes in the prefix cache", levels.kept_bytes)
        yield self._gauge(
            "tokenteller_kv_peak_demand_bytes",
            "Most K/V bytes that the running sequences can come to need",
            levels.peak_demand_bytes,
        )

    def _cache_config(self, budget_bytes: int) -> Metric:
        layout = self._layout
        rows = max(1, PAGE_BYTES // layout.row_bytes) if layout.paged else layout.max_context
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "block_size: rows that share a page in every lane; num_gpu_blocks: how many such blocks the pool holds",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        family.add_metric([self._model, str(rows), str(budget_bytes // layout.committed(rows))], 1)
        return family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, help: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family
