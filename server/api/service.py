"""Service: all parts of one running server, and how a route finds them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastapi import Request

from model.kv_memory import KVPlan
from server.api.stream import Streams
from server.engine.engine import Engine
from server.settings import ServeSettings

_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Service:
    """What the routes need."""

    settings: ServeSettings
    model_name: str
    plan: KVPlan
    engine: Engine
    streams: Streams


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def request_id(request: Request, ours: str) -> str:
    """The client's own X-Request-Id where it is harmless in a header and a log line, else ours."""
    theirs = request.headers.get("x-request-id", "")
    return theirs if _SAFE_ID.fullmatch(theirs) else ours
