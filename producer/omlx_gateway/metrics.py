"""What a gateway tells Prometheus of its requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx_producer.metrics import QueueCollector, metrics_server, scraping_client

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
NO_ROUTE = "none"
HUNG_UP = "499"


class MeasuredApp(Collector):
    """An application, and counts of its requests.

    A request is over when its answer is, so a stream counts for as long as it lasts.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # A worker reads these from the files of its gateway, where gauges need a mode.
        self._open = Gauge(
            "omlx_http_requests_in_progress",
            "Open requests.",
            registry=None,
            multiprocess_mode="livesum",
        )
        self._done = Counter(
            "omlx_http_requests",
            "Requests that are over.",
            ["handler", "status"],
            registry=None,
        )
        self._seconds = Histogram(
            "omlx_http_request_duration_seconds",
            "Until the answer is over.",
            ["handler"],
            registry=None,
            buckets=_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = HUNG_UP, time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            with self._open.track_inprogress():
                await self._app(scope, receive, noted)
        finally:
            handler = _handler(scope)
            self._done.labels(handler, status).inc()
            self._seconds.labels(handler).observe(time.monotonic() - began)

    def collect(self) -> Iterable[Metric]:
        for each in (self._open, self._done, self._seconds):
            yield from each.collect()


@contextlib.contextmanager
def serve_metrics(host: str, port: int, app: MeasuredApp, url: str) -> Iterator[int]:
    """Serve the metrics of a gateway and of its Redis until the block ends; yields the port.

    Raises:
        OmlxQueueError: if nothing can be served there.
    """
    with (
        scraping_client(url) as client,
        metrics_server(host, port, app, QueueCollector(client)) as served,
    ):
        yield served


def _handler(scope: Scope) -> str:
    """The name of a route's function. Paths without a route share one: anybody can invent them."""
    found = scope.get("endpoint")
    return getattr(found, "__name__", type(found).__name__) if found else NO_ROUTE
