"""The application: routes, and one producer for as long as it runs."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from omlx_gateway.access import KeyCheck, SiteCheck
from omlx_gateway.batches import shrink_indexes
from omlx_gateway.errors import ApiError, ErrorAnswers, log
from omlx_gateway.gateway import Gateway
from omlx_gateway.keys import KeyFile
from omlx_gateway.limits import Limits
from omlx_gateway.routes import routes
from omlx_producer.complaints import cause
from omlx_producer.connection import redis_url

CLEAN_SECONDS = 600


def create_app(
    url: str | None = None,
    limits: Limits | None = None,
    keys: KeyFile | None = None,
    hosts: Collection[str] = (),
) -> Starlette:
    """The gateway as an ASGI application.

    Args:
        url: where Redis is; by default where the environment says.
        keys: who may ask; by default everybody.
        hosts: names at which it answers everybody, beside those of this machine.

    Raises:
        InvalidRequest: if it is not the URL of a Redis server.
    """
    gateway = Gateway.connect(redis_url(url), limits or Limits())
    middleware = [
        Middleware(ErrorAnswers),
        Middleware(SiteCheck, hosts) if keys is None else Middleware(KeyCheck, keys),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.gateway = gateway
        cleaning = asyncio.create_task(_clean_up(gateway))
        try:
            yield
        finally:
            cleaning.cancel()
            await gateway.close()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: _answer_http, ClientDisconnect: _answer_nobody},
    )
    # A redirect would name the host that the request names.
    app.router.redirect_slashes = False
    return app


async def _clean_up(gateway: Gateway) -> None:
    """Remove entries of what has gone, now and then."""
    while True:
        try:
            await run_in_threadpool(shrink_indexes, gateway.blocking)
        except RedisError as error:
            log.warning("cleaning up has failed, and is tried again later: %s", cause(error))
        await asyncio.sleep(CLEAN_SECONDS)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client hung up before its request was whole."""
    return Response(status_code=499)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    """404 and 405 of the router, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    here = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    if here:
        allowed = ", ".join(sorted({each for route in here for each in route.methods or ()}))
        headers, told = {"Allow": allowed}, f"no {request.method} here; give {allowed}"
    else:
        paths = [route.path for route in routes if route.path.startswith("/v1/")]
        [near] = difflib.get_close_matches(path, paths, n=1) or ["one that docs/http.md names"]
        headers, told = {}, f"no such path; give {near} (the base URL ends in /v1)"
    answer = ApiError(error.status_code, f"{request.method} {path}: {told}", headers=headers)
    return answer.response
