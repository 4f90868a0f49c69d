"""Service: all parts of one running server, and how a route finds them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from tokenteller.model.kv_memory import KVPlan
from tokenteller.server.api.stream import Streams
from tokenteller.server.engine.engine import Engine
from tokenteller.server.metrics import Metrics
from tokenteller.server.settings import ServeSettings


@dataclass(slots=True)
class Service:
    """What the routes need."""

    settings: ServeSettings
    model_name: str
    plan: KVPlan
    engine: Engine
    streams: Streams
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def request_id(request: Request, ours: str) -> str:
    """The client's own X-Request-Id where it is harmless in a header and a log line, else ours."""
    theirs: str | None = request.state.request_id
    return theirs or ours
