"""Errors in OpenAI's form, with the status that OpenAI's clients act on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx_producer.complaints import cause
from omlx_producer.errors import (
    InvalidRequest,
    JobError,
    JobTimeout,
    MalformedResult,
    ModelNotFound,
    OmlxQueueError,
    TokensLost,
    UnknownJob,
    UnsuitableRedis,
    one_line,
    unquoted,
)
from omlx_producer.outage import passes
from omlx_producer.wire.end import STATES

RETRY_SECONDS = 5
LINGER_SECONDS = 1.0
"""For the rest of a body that is refused."""
# OpenAI's clients send a request again after 409 and 5xx, unless they are told not to.
FINAL = {"X-Should-Retry": "false"}
log = logging.getLogger("omlx_gateway")


@dataclass
class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        param: the field of the request that is wrong.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class NotStored(OSError):
    """What cannot be written, such as on a full disk. The message is one sentence."""


def api_error(error: Exception | asyncio.CancelledError) -> ApiError:
    """What to answer instead of an exception. One that no request should meet is logged."""
    # `told` leaves out advice for Python.
    told = error.told(error.field) if isinstance(error, InvalidRequest) else str(error)
    sentence = one_line(told)
    match error:
        case ApiError():
            return error
        case asyncio.CancelledError():
            again = {"Retry-After": str(RETRY_SECONDS)}
            told = f"the gateway stops; try again in {RETRY_SECONDS} s"
            return ApiError(503, told, "server_error", "gateway_stops", headers=again)
        case ModelNotFound():
            return ApiError(404, sentence, code="model_not_found", param="model")
        case UnknownJob():
            return ApiError(404, sentence, code="job_not_found")
        case InvalidRequest():
            return ApiError(400, sentence, param=error.field or None)
        case MalformedResult():
            return ApiError(500, sentence, "server_error", "malformed_result", headers=FINAL)
        case JobError():
            state = STATES[error.code]
            if state.refused:
                return ApiError(state.http, sentence, param=error.field or None)
            code = f"job_{error.code}"
            return ApiError(state.http, sentence, "server_error", code, headers=FINAL)
        case JobTimeout():
            return ApiError(504, sentence, "server_error", "timeout", headers=FINAL)
        case TokensLost():
            return ApiError(500, sentence, "server_error", "tokens_lost", headers=FINAL)
        case NotStored():
            log.error(sentence)
            return ApiError(507, sentence, "server_error", "not_stored", headers=FINAL)
        case UnsuitableRedis():
            return ApiError(503, sentence, "server_error", "unsuitable_redis")
        case RedisError() if passes(error):
            return ApiError(
                503,
                f"Redis is unavailable ({cause(error)}); try again in {RETRY_SECONDS} s",
                "server_error",
                "redis_unavailable",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        case RedisError():
            return ApiError(500, cause(error), "server_error", "redis_error")
        case OmlxQueueError():
            return ApiError(500, sentence, "server_error", "redis_error")
    log.error("a request failed", exc_info=unquoted(error))
    return ApiError(500, "the gateway failed; its log says where", "server_error", "internal_error")


class ErrorAnswers:
    """Middleware that answers whatever is raised. An answer that has begun is cut."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = read = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def body() -> Message:
            nonlocal read
            message = await receive()
            read = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, body, noted)
        # `api_error` logs those of other kinds.
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            answer = api_error(error).response
            if not begun:
                # The system answers what comes to a closed connection with a reset, which takes
                # the answer from the client. Who asks before sending a body sends none.
                if not any(name == b"expect" for name, _ in scope["headers"]):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LINGER_SECONDS):
                            while not read:
                                await body()
                await answer(scope, receive, send)
