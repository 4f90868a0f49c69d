"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tokenteller.server.api.respond import json_response
from tokenteller.server.api.service import Service, service_of
from tokenteller.server.errors import ModelNotFound

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The models served here, which is one."""
    return json_response({"object": "list", "data": [_description(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The model of this name, if it is served."""
    service = service_of(request)
    check_model(service, name)
    return json_response(_description(service))


def check_model(service: Service, name: str | None) -> None:
    """Raises ModelNotFound for the name of another model. No name means the one that is served."""
    if name is not None and name != service.model_name:
        raise ModelNotFound(f"the model {name[:100]!r} is not served here; {service.model_name!r} is", param="model")


def _description(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "tokenteller",
        "root": service.model_name,
        "max_model_len": service.max_context,
    }
