"""What Redis says of models, queues and batches, for Prometheus, and the server of all metrics.

Everything is read when it is scraped. Whoever serves metrics tells the same of one Redis, so take
the maximum over instances, not the sum.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import redis
from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from omlx_producer.bulk.batch import BatchState, read_batches
from omlx_producer.client.workers import Exported
from omlx_producer.connection import connect, server_time
from omlx_producer.errors import OmlxQueueError
from omlx_producer.figures import read_figures
from omlx_producer.program import port_error
from omlx_producer.wire.keys import BATCHES_ENDED_KEY, BATCHES_KEY

HOUR = 3600.0
_LATENCIES = (10, 60, 300, 900, 1800, HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 16 * HOUR, 24 * HOUR)

_UP = Exported("redis_up", "Whether Redis answers.")
_WORKERS = Exported("workers", "Workers of a model that have not fallen silent.")
_LOADING = Exported("workers_loading", "Those of them that load the model.")
_LENGTH = Exported("queue_length", "Jobs, and rows of batches, that wait in Redis for a worker.")
_OLDEST = Exported(
    "queue_oldest_seconds",
    "Age of the oldest of them that is first in its queue or batch; 0 if none waits.",
)
_ROWS = Exported("batch_rows", "Rows of the batches that are open, by state.")
_BATCHES = Exported("batches_open", "Batches that are open.")

Sample = tuple[Exported, Mapping[str, str], float]
"""A figure for Prometheus with its labels."""


def draw(samples: Iterable[Sample]) -> Iterable[Metric]:
    """Samples as Prometheus knows them."""
    families = dict[str, CounterMetricFamily | GaugeMetricFamily]()
    for exported, labels, value in samples:
        make = CounterMetricFamily if exported.counts else GaugeMetricFamily
        name = f"omlx_{exported.name}"
        family = families.setdefault(name, make(name, exported.text, labels=list(labels)))
        family.add_metric(list(labels.values()), value)
    return families.values()


def scraping_client(url: str) -> redis.Redis:
    """A client for `QueueCollector`: a scrape does not wait for a Redis that hangs."""
    never = Retry(NoBackoff(), 0)
    return connect(url, socket_timeout=2.0, socket_connect_timeout=1.0, retry=never)


@contextlib.contextmanager
def metrics_server(host: str, port: int, *collectors: Collector) -> Iterator[int]:
    """Serve metrics over HTTP until the block ends; yields the port.

    Args:
        port: 0 takes a free one.

    Raises:
        OmlxQueueError: if nothing can be served there.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        options = f"--metrics-host {host} --metrics-port {port}"
        raise OmlxQueueError(port_error(options, error)) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class QueueCollector(Collector):
    """Figures of all models and batches of one Redis.

    Args:
        connection: asked at each scrape; see `scraping_client`.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._latency = Histogram(
            "omlx_batch_job_e2e_latency_seconds",
            "From the upload of a batch to its last row, of batches that ended while this runs.",
            ["status"],
            registry=None,
            buckets=_LATENCIES,
        )
        for status in ("completed", "expired", "cancelled"):
            self._latency.labels(status)
        self._since: float | None = None
        with contextlib.suppress(RedisError):
            self._since = server_time(connection)

    def collect(self) -> Iterable[Metric]:
        samples: list[Sample] = [(_UP, {}, 1.0)]
        found = list[Metric]()
        try:
            with self._lock:
                self._note_ends()
                samples += self._read()
                found = list(self._latency.collect())
        except RedisError:
            samples = [(_UP, {}, 0.0)]
        yield from (*draw(samples), *found)

    def _read(self) -> Iterator[Sample]:
        models, states = read_figures(self._connection), self._states(BATCHES_KEY)
        for model in models:
            named = {"model_name": model.alias}
            yield _WORKERS, named, len(model.workers)
            yield _LOADING, named, sum(worker.is_loading for worker in model.workers)
            yield _OLDEST, named, model.oldest_seconds or 0.0
            for priority, queue in model.queues.items():
                yield _LENGTH, {**named, "priority": priority}, queue.waiting
        waiting = sum(queue.batch_rows for model in models for queue in model.queues.values())
        counts = {
            "waiting": waiting,
            "running": max(0, sum(state.left for state in states) - waiting),
            "ok": sum(state.ok for state in states),
            "failed": sum(state.failed for state in states),
        }
        for name, count in counts.items():
            yield _ROWS, {"state": name}, count
        yield _BATCHES, {}, len(states)

    def _note_ends(self) -> None:
        """Count the batches that have ended since the last time."""
        if self._since is None:
            self._since = server_time(self._connection)
        for state in self._states(BATCHES_ENDED_KEY, f"({self._since}"):
            if state.ended_at is not None:
                self._since = max(self._since, state.ended_at)
                seconds = state.ended_at - state.created_at
                self._latency.labels(state.status).observe(seconds)

    def _states(self, key: str, since: str = "-inf") -> list[BatchState]:
        runs: Any = self._connection.zrangebyscore(key, since, "+inf")
        return read_batches(self._connection, runs)
