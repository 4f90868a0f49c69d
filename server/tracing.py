"""One GenAI span per request, through opentelemetry-api; costs next to nothing unless an SDK is set up.

Attributes follow OpenTelemetry's GenAI conventions. No prompt and no text is ever recorded.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from tokenteller.server.engine.sequence import Request
from tokenteller.server.metrics import Served

PROVIDER = "tokenteller"


def start(operation: str, model: str, request: Request) -> Span:
    """Starts a child of the current span, which is the HTTP request's."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.top_k": request.sampling.top_k,
        "gen_ai.request.choice.count": request.n,
    }
    tracer = trace.get_tracer("tokenteller")
    return tracer.start_span(f"{operation} {model}", kind=SpanKind.INTERNAL, attributes=attributes)


def end(span: Span, served: Served) -> None:
    """Records the outcome and ends the span."""
    if span.is_recording():
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": served.prompt_tokens,
                "gen_ai.usage.output_tokens": served.completion_tokens,
                "gen_ai.response.finish_reasons": served.reasons,
                "tokenteller.cached_tokens": served.cached_tokens,
            }
        )
        for name in ("slot", "queued_s", "ttft_s"):
            value = getattr(served, name)
            if value is not None:
                span.set_attribute(f"tokenteller.{name}", value)
        if served.error:
            span.set_attribute("error.type", served.error)
            span.set_status(StatusCode.ERROR)
    span.end()
