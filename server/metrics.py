"""Prometheus metrics: vLLM's names where the meaning is the same, OpenTelemetry's GenAI histograms, and our own.

A request and a step cost a few microseconds, a token one bisection. No label holds anything a client sends, so the
number of series does not grow with traffic. Gauges are in gauges.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenteller.model.kv_memory import KVLayout
from tokenteller.server.errors import codes
from tokenteller.server.gauges import Levels, LevelsCollector

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
DURATION = tuple(0.01 * 2**power for power in range(16))
TOKENS = tuple(2.0**power for power in range(16))
STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

REASONS = ("stop", "length", "deadline", "cancelled", "error", "shutdown")


@dataclass(frozen=True, slots=True)
class Served:
    """What metrics, log and trace record of a request when it is over. Times are None if it did not get that far.

    reasons: how each choice ended, one of REASONS. error: the code of the error that ended the request.
    """

    id: str
    operation: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    reasons: tuple[str, ...]
    error: str | None
    slot: int | None
    queued_s: float | None
    ttft_s: float | None
    prefill_s: float | None
    decode_s: float | None
    total_s: float

    @property
    def per_token_s(self) -> float | None:
        """Mean gap after the first token."""
        if not self.decode_s or self.completion_tokens < 2:
            return None
        return self.decode_s / (self.completion_tokens - 1)


class Gaps(Collector):
    """Histogram of the gaps between tokens. The library's own costs 2 microseconds per token, this one a bisection."""

    def __init__(self, name: str, help: str, model: str) -> None:
        self._name, self._help, self._model = name, help, model
        self._counts = [0] * (len(PER_TOKEN) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(PER_TOKEN, seconds)] += 1
        self._sum += seconds

    def counts(self) -> list[int]:
        """Gaps per bucket of PER_TOKEN, and beyond the last."""
        return self._counts.copy()

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, PER_TOKEN)), "+Inf"], list(self._counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric([self._model], buckets, self._sum)
        yield family


class Families:
    """Creates metrics in one registry, all with the label model_name."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ["model_name"], registry=self._registry).labels(self._model)

    def counters(self, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """One counter per value of a closed set, each at 0 from the start."""
        family = Counter(name, help, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)


class VllmFamilies:
    """vLLM's names with vLLM's meaning, for existing dashboards and gateways."""

    def __init__(self, make: Families) -> None:
        self.prompt_tokens = make.counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token")
        self.generation_tokens = make.counter("vllm:generation_tokens", "Generated tokens")
        self.success = make.counters(
            "vllm:request_success", "Choices that did not fail", "finished_reason", ("stop", "length", "abort")
        )
        make.counter("vllm:num_preemptions", "Preempted sequences; always 0: nothing that runs is preempted")
        self.prefix_queries = make.counter("vllm:prefix_cache_queries", "Prompt tokens looked up for reuse")
        self.prefix_hits = make.counter("vllm:prefix_cache_hits", "Prompt tokens whose K/V was reused")
        self.ttft = make.histogram("vllm:time_to_first_token_seconds", "Arrival to first token", TTFT)
        self.per_token = make.histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap between the tokens of a request", PER_TOKEN
        )
        self.e2e = make.histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", DURATION)
        self.queue = make.histogram("vllm:request_queue_time_seconds", "Arrival to slot", TTFT)
        self.prefill = make.histogram("vllm:request_prefill_time_seconds", "Slot to first token", TTFT)
        self.decode = make.histogram("vllm:request_decode_time_seconds", "First to last token", DURATION)
        self.inference = make.histogram("vllm:request_inference_time_seconds", "Slot to last token", DURATION)
        self.prompt = make.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.generation = make.histogram("vllm:request_generation_tokens", "Generated tokens of a request", TOKENS)
        self.max_tokens = make.histogram("vllm:request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.iteration = make.histogram("vllm:iteration_tokens_total", "Rows computed by one step", TOKENS)


class GenAIFamilies:
    """OpenTelemetry's GenAI server histograms under their Prometheus names, with finer small buckets."""

    LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_response_model")

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to last token",
            [*self.LABELS, "error_type"],
            buckets=DURATION,
            registry=registry,
        )
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token of requests that did not fail",
            self.LABELS,
            buckets=TTFT,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean gap between the tokens of requests that did not fail",
            self.LABELS,
            buckets=PER_TOKEN,
            registry=registry,
        )

    def served(self, served: Served) -> None:
        labels = (served.operation, "tokenteller", self._model)
        self.duration.labels(*labels, served.error or "").observe(served.total_s)
        if served.error is None and served.ttft_s is not None:
            self.ttft.labels(*labels).observe(served.ttft_s)
            if served.per_token_s is not None:
                self.per_token.labels(*labels).observe(served.per_token_s)


class OwnFamilies:
    """What neither vLLM nor OpenTelemetry has a name for."""

    def __init__(self, make: Families, registry: CollectorRegistry) -> None:
        self.choices = make.counters("tokenteller_choices", "Choices by finish reason", "reason", REASONS)
        self.refusals = make.counters("tokenteller_refusals", "Error responses by code", "code", codes())
        self.responses = Counter(
            "tokenteller_http_responses", "Responses by route and status", ["route", "status"], registry=registry
        )
        self.step = make.histogram("tokenteller_step_seconds", "Duration of a step", STEP)
        self.cancel = make.histogram(
            "tokenteller_cancel_to_free_seconds", "From a cancel or disconnect until the slots are free", STEP
        )


class Metrics:
    """The metrics of one server. Its methods may be called from any thread."""

    def __init__(self, model: str = "") -> None:
        disable_created_metrics()
        self.tokens_generated = 0
        self.requests_served = 0
        self._model = model
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        make = Families(self.registry, model)
        self._vllm = VllmFamilies(make)
        self._gen_ai = GenAIFamilies(self.registry, model)
        self._own = OwnFamilies(make, self.registry)
        self.gaps = Gaps("vllm:inter_token_latency_seconds", "Gap between two tokens of a choice", model)
        self.registry.register(self.gaps)

    def first_token(self, prompt_tokens: int, looked_up: bool, cached_tokens: int) -> None:
        self._vllm.prompt_tokens.inc(prompt_tokens)
        self._vllm.prefix_queries.inc(prompt_tokens if looked_up else 0)
        self._vllm.prefix_hits.inc(cached_tokens)

    def tokens(self, count: int) -> None:
        self.tokens_generated += count
        self._vllm.generation_tokens.inc(count)

    def step(self, rows: int, seconds: float) -> None:
        self._vllm.iteration.observe(rows)
        self._own.step.observe(seconds)

    def freed(self, seconds: float) -> None:
        """The slots of a cancelled request came free `seconds` after the cancel."""
        self._own.cancel.observe(seconds)

    def refused(self, code: str) -> None:
        self._own.refusals[code].inc()

    def responded(self, route: str, status: int) -> None:
        self._own.responses.labels(route, status).inc()

    def served(self, served: Served) -> None:
        """Records a request that is over."""
        self.requests_served += 1
        vllm = self._vllm
        for reason in served.reasons:
            self._own.choices[reason].inc()
            if reason in ("stop", "length", "cancelled"):
                vllm.success["abort" if reason == "cancelled" else reason].inc()
        self._gen_ai.served(served)
        vllm.e2e.observe(served.total_s)
        vllm.prompt.observe(served.prompt_tokens)
        vllm.generation.observe(served.completion_tokens)
        vllm.max_tokens.observe(served.max_tokens)
        inference = None if served.queued_s is None else served.total_s - served.queued_s
        for histogram, seconds in (
            (vllm.queue, served.queued_s),
            (vllm.ttft, served.ttft_s),
            (vllm.prefill, served.prefill_s),
            (vllm.decode, served.decode_s),
            (vllm.inference, inference),
            (vllm.per_token, served.per_token_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def show_levels(self, read: Callable[[], Levels], info: dict[str, str], layout: KVLayout) -> None:
        """Adds the gauges; `read` is called at each scrape."""
        self.registry.register(LevelsCollector(read, self._model, info, layout))

    def text(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self.registry)
