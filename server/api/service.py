"""The parts of a running server, as routes see them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from tokenteller.model.kv_memory import KVPlan
from tokenteller.server.api.streams import Streams
from tokenteller.server.engine.engine import Engine
from tokenteller.server.metrics import Metrics
from tokenteller.server.settings import ServeSettings


@dataclass(slots=True)
class Service:
    """Everything a route needs. Every protocol is an adapter over this."""

    settings: ServeSettings
    model_name: str
    plan: KVPlan
    engine: Engine
    streams: Streams
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_context(self) -> int:
        return self.engine.scheduler.ledger.layout.max_context


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def request_id(request: Request, own: str) -> str:
    """The client's X-Request-Id if it sent a valid one, else `own`."""
    client_id: str | None = request.state.request_id
    return client_id or own
