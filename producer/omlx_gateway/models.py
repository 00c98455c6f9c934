"""GET /v1/models and /health."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from omlx_gateway.access import key_of, require_model
from omlx_gateway.errors import ApiError
from omlx_gateway.gateway import Gateway
from omlx_producer import ModelInfo
from omlx_producer.connection import require_suitable


async def models(request: Request) -> JSONResponse:
    known = await Gateway.of(request).producer.models()
    key = key_of(request)
    data = [
        _model(alias, info) for alias, info in known.items() if key is None or key.may_use(alias)
    ]
    return JSONResponse({"object": "list", "data": data})


async def model(request: Request) -> JSONResponse:
    alias = request.path_params["alias"]
    require_model(request, alias)
    known = await Gateway.of(request).producer.models()
    if alias not in known:
        raise ApiError(
            404, f"no worker has announced the model {alias!r:.200}", code="model_not_found"
        )
    return JSONResponse(_model(alias, known[alias]))


def health(request: Request) -> JSONResponse:
    connection = Gateway.of(request).blocking
    connection.ping()
    require_suitable(connection, allow_eviction=None)
    return JSONResponse({"status": "ok"})


def _model(alias: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": alias,
        "object": "model",
        "created": int(info.announced_at),
        "owned_by": "omlx-queue",
        "context_length": info.context_length,
    }


routes = [
    Route("/v1/models", models),
    Route("/v1/models/{alias:path}", model),
    Route("/health", health),
]
