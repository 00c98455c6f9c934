"""GET /: a page of models, workers and batches. GET and POST /status: what it shows and presses."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import redis
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from omlx_gateway.access import PAGE_HEADER, require_admin
from omlx_gateway.errors import ApiError
from omlx_gateway.gateway import Gateway
from omlx_producer.bulk.batch import Batch, BatchState, read_batches
from omlx_producer.client.models import read_models
from omlx_producer.client.workers import read_rates
from omlx_producer.connection import server_time
from omlx_producer.figures import ModelFigures, read_figures
from omlx_producer.operate import pause_model, resume_model
from omlx_producer.wire.keys import BATCHES_ENDED_KEY, BATCHES_KEY

BATCHES_SHOWN = 50
_NOT_KEPT = {"Cache-Control": "no-store"}


def page(_: Request) -> HTMLResponse:
    html, headers = _read_page()
    return HTMLResponse(html, headers=headers)


class Snapshot(BaseModel):
    """What the page shows; ``at`` is in seconds since 1970, on Redis's clock."""

    at: float
    models: list[ModelFigures]
    batches: list[BatchState]


def status(request: Request) -> Response:
    """One snapshot. Starlette runs this on a thread, as it does all plain functions."""
    require_admin(request)
    connection = Gateway.of(request).blocking
    found = Snapshot(
        at=server_time(connection),
        models=read_figures(connection),
        batches=read_latest_batches(connection),
    )
    return Response(found.model_dump_json(), headers=_NOT_KEPT, media_type="application/json")


def history(request: Request) -> JSONResponse:
    """Tokens a second of each model in the last minutes; see `read_rates`."""
    require_admin(request)
    connection = Gateway.of(request).blocking
    found = {model: read_rates(connection, model) for model in read_models(connection)}
    return JSONResponse(found, headers=_NOT_KEPT)


def pause(request: Request) -> JSONResponse:
    _require_page(request)
    changed = pause_model(Gateway.of(request).blocking, request.path_params["model"])
    return JSONResponse({"changed": changed})


def resume(request: Request) -> JSONResponse:
    _require_page(request)
    changed = resume_model(Gateway.of(request).blocking, request.path_params["model"])
    return JSONResponse({"changed": changed})


def cancel_batch(request: Request) -> JSONResponse:
    _require_page(request)
    changed = Batch(Gateway.of(request).blocking, request.path_params["batch"]).cancel()
    return JSONResponse({"changed": changed})


routes = [
    Route("/", page),
    Route("/status", status),
    Route("/status/history", history),
    Route("/status/pause/{model:path}", pause, methods=["POST"]),
    Route("/status/resume/{model:path}", resume, methods=["POST"]),
    Route("/status/cancel/{batch}", cancel_batch, methods=["POST"]),
]


def read_latest_batches(connection: redis.Redis) -> list[BatchState]:
    """Open batches and runs, then those that ended in the last seven days; the newest first."""
    runs: list[Any] = [
        run
        for key in (BATCHES_KEY, BATCHES_ENDED_KEY)
        for run in connection.zrange(key, 0, BATCHES_SHOWN - 1, desc=True)
    ]
    return read_batches(connection, list(dict.fromkeys(runs))[:BATCHES_SHOWN])


def _require_page(request: Request) -> None:
    require_admin(request)
    if PAGE_HEADER not in request.headers:
        raise ApiError(403, f"{PAGE_HEADER}: missing; send this header with any value")


@cache
def _read_page() -> tuple[str, dict[str, str]]:
    """The page, and headers that let it run its own script and nothing else."""
    html = resources.files("omlx_gateway").joinpath("page.html").read_text("utf-8")
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"script-src {_hash(html, 'script')}",
        f"style-src {_hash(html, 'style')}",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }


def _hash(html: str, tag: str) -> str:
    """The source expression of the page's only element of this kind."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
