"""An end for the body of a request that comes too slowly."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx_gateway.errors import ApiError
from omlx_gateway.limits import SLOWEST_BYTES


class BodyDeadline:
    """Middleware: a body has some seconds, and more for what of it has come.

    Whoever reads it too late gets an ApiError, 408.
    """

    def __init__(self, app: ASGIApp, patience: float) -> None:
        self._app = app
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        due: float | None = loop.time() + self._patience

        async def receive_in_time() -> Message:
            nonlocal due
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the body has not come within {self._patience:g} s; send it faster",
                    code="timeout",
                    headers={"Connection": "close"},
                ) from None
            if not message.get("more_body", False):
                due = None
            elif due is not None:
                due += len(message["body"]) / SLOWEST_BYTES
            return message

        await self._app(scope, receive_in_time, send)
