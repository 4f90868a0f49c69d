"""/metrics is true, cheap, and does not grow with traffic."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from live import CLIENT, Live, serve
from prometheus_client.parser import text_string_to_metric_families

from tokenteller.server.metrics import PER_TOKEN, Gaps, Metrics


def scrape(live: Live) -> dict[str, float]:
    """Every sample: name{label="value",...} without the model's label -> value."""
    text = CLIENT.get(live.url + "/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "model_name")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def test_counts_agree_with_what_clients_saw(live: Live) -> None:
    before = scrape(live)
    answers = [live.generate(f"request {at}", max_tokens=5 + at, ignore_eos=True) for at in range(4)]
    stopped = live.generate("stop", max_tokens=40, seed=1, stop=["e", "a", "\x01", "t", "o", " "], temperature=5)
    live.wait_idle()
    told = [*answers, stopped]
    change = grown(before, scrape(live))
    assert change["vllm:prompt_tokens_total"] == sum(answer["usage"]["prompt_tokens"] for answer in told)
    length = sum(answer["choices"][0]["finish_reason"] == "length" for answer in told)
    assert change['vllm:request_success_total{finished_reason="length"}'] == length
    assert change['tokenteller_choices_total{reason="length"}'] == length
    tokens = sum(answer["usage"]["completion_tokens"] for answer in told)
    assert change["vllm:request_generation_tokens_sum"] == tokens
    assert change["vllm:generation_tokens_total"] >= tokens  # a token may be generated after a stop sequence
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert change[f"vllm:{name}_seconds_count"] == 5
    assert change["vllm:inter_token_latency_seconds_count"] == tokens - 5
    queue, prefill, ttft = (
        change[f"vllm:{name}_seconds_sum"]
        for name in ("request_queue_time", "request_prefill_time", "time_to_first_token")
    )
    assert queue + prefill == pytest.approx(ttft)
    labels = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="tokenteller",gen_ai_response_model="rand0"'
    assert change[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 5
    assert change["tokenteller_step_seconds_count"] >= 5


def test_only_prompts_that_may_use_the_prefix_cache_count_as_queries(live: Live) -> None:
    before = scrape(live)
    tokens = live.generate("looked up", max_tokens=1)["usage"]["prompt_tokens"]
    live.generate("not looked up", max_tokens=1, cache_prefix=False)
    assert grown(before, scrape(live))["vllm:prefix_cache_queries_total"] == tokens


def test_refusals_cancels_and_gauges_are_exported(rand: Path) -> None:
    left: dict[str, Any] = {"prompt": "left", "max_tokens": 250, "ignore_eos": True}
    with serve(0.004, model=str(rand), slots=2) as live:
        idle = scrape(live)
        live.post(prompt="x", max_tokens=10**6)
        live.post(prompt="x", bogus=1)
        CLIENT.get(live.url + "/nowhere")
        with ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(CLIENT.stream("POST", live.url + "/generate", json=left))
            while True:
                busy = scrape(live)
                if busy["vllm:num_requests_running"] == 2 and busy["vllm:num_requests_waiting"] == 1:
                    break
            assert busy['tokenteller_waiting{reason="slot"}'] == 1
            assert busy["tokenteller_tasks"] >= idle["tokenteller_tasks"] + 3
            assert busy['tokenteller_slots{state="running"}'] == 2 and busy['tokenteller_slots{state="free"}'] == 0
            assert 0 < busy["vllm:kv_cache_usage_perc"] <= 1
            assert 0 < busy['tokenteller_kv_bytes{by="formula"}'] <= busy['tokenteller_kv_bytes{by="ledger"}']
            assert busy['tokenteller_kv_bytes{by="ledger"}'] <= busy["tokenteller_kv_peak_demand_bytes"]
            assert busy["tokenteller_prefix_kept_bytes"] <= busy['tokenteller_kv_bytes{by="ledger"}']
            assert busy["tokenteller_kv_peak_demand_bytes"] <= busy["tokenteller_kv_budget_bytes"]
        live.wait_idle()
        after = scrape(live)
        change = grown(idle, after)
        assert change['tokenteller_refusals_total{code="never_fits"}'] == 1
        assert change['tokenteller_refusals_total{code="invalid_value"}'] == 1
        assert change['tokenteller_http_responses_total{route="/generate",status="422"}'] == 2
        assert change['tokenteller_http_responses_total{route="none",status="404"}'] == 1
        assert change['tokenteller_choices_total{reason="cancelled"}'] == 3
        assert change['vllm:request_success_total{finished_reason="abort"}'] == 3
        assert change["tokenteller_cancel_to_free_seconds_count"] == 2  # the third held no slot
        assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
        assert after["tokenteller_prefix_kept_bytes"] == after['tokenteller_kv_bytes{by="ledger"}'] > 0
        assert after["tokenteller_healthy"] == 1 and after["tokenteller_draining"] == 0
        assert after['tokenteller_kv_bytes{by="kernel"}'] == after['tokenteller_kv_bytes{by="ledger"}']


def test_the_number_of_series_does_not_grow_with_traffic(live: Live) -> None:
    def hostile(at: int) -> None:
        live.text(f"{at}", max_tokens=3)
        live.post(f"/nowhere/{at}", prompt="x")
        live.post(prompt="x", **{f"field{at}": 1})
        headers = {"X-Request-Id": f"id-{at}", "User-Agent": f"agent {at}", "Host": f"host{at}"}
        CLIENT.get(live.url + "/health", headers=headers)
        CLIENT.request(f"METHOD{at}", live.url + "/health")

    hostile(0)
    scrape(live)  # counts itself from now on
    series = scrape(live).keys()
    for at in range(1, 20):
        hostile(at)
    assert scrape(live).keys() == series


def test_metrics_work_while_the_engine_does_not_and_for_head(rand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model=str(rand), slots=2) as live:
        monkeypatch.setattr(live.service.streams, "ended", "it died")
        live.service.engine.ask(lambda scheduler, runner: time.sleep(1.0))
        head = CLIENT.head(live.url + "/metrics")
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert scrape(live)["tokenteller_healthy"] == 0


def test_gaps_export_what_the_librarys_histogram_would() -> None:
    from prometheus_client import CollectorRegistry, Histogram, generate_latest

    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("gap_seconds", "h", ["model_name"], buckets=PER_TOKEN, registry=theirs).labels("m")
    gaps = Gaps("gap_seconds", "h", "m")
    ours.register(gaps)
    for seconds in (0.0, 0.0005, 0.0006, 0.01, 0.3, 5.0, 7.0):
        reference.observe(seconds)
        gaps.observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)


def test_every_request_has_a_span_once_an_sdk_is_set_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", lambda *names, **more: provider.get_tracer("tokenteller"))
    answer = live.generate("a secret prompt", max_tokens=7, ignore_eos=True)
    live.wait_idle()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    http, ours = spans["POST /generate"], spans["text_completion rand0"]
    assert ours.parent is not None and ours.parent.trace_id == http.context.trace_id
    attributes: dict[str, Any] = dict(ours.attributes or {})
    assert attributes["gen_ai.usage.output_tokens"] == 7 and attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert "secret" not in json.dumps([span.to_json() for span in spans.values()])


def test_metrics_of_two_servers_in_one_process_are_separate() -> None:
    one, two = Metrics("one"), Metrics("two")
    one.tokens(3)
    assert b'vllm:generation_tokens_total{model_name="two"} 0.0' in two.text()
