"""What Redis says of models, queues and batches, for Prometheus, and the server of all metrics.

Everything is read when it is scraped. Whoever serves metrics tells the same of one Redis, so take
the maximum over instances, not the sum.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import redis
from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from redis.utils import str_if_bytes

from omlx_producer.bulk.batch import BATCHES_ENDED_KEY, BATCHES_KEY, Batch, BatchState
from omlx_producer.cli.common import port_error
from omlx_producer.client.models import read_models
from omlx_producer.client.waiting import date_seconds, queued_models, read_waiting
from omlx_producer.client.workers import living, server_time, workers_key
from omlx_producer.connection import connect
from omlx_producer.errors import MalformedResult, OmlxQueueError, UnknownJob
from omlx_producer.wire import PRIORITIES, read_queue_name

STATUSES = {"done": "completed", "expired": "expired", "cancelled": "cancelled"}
"""OpenAI's names of a batch's states."""

HOUR = 3600.0
_LATENCIES = (10, 60, 300, 900, 1800, HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 16 * HOUR, 24 * HOUR)

# When the first rows of these lists were uploaded.
_HEADS = """
local dates = {}
for i, key in ipairs(KEYS) do
  local entry = redis.pcall('LINDEX', key, 0)
  dates[i] = type(entry) == 'string' and string.match(entry, '^%S+ %S+ (%S+)') or false
end
return dates
"""


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
        self._since: float | None = None
        self._latency = Histogram(
            "omlx_batch_job_e2e_latency_seconds",
            "From the upload of a batch to its last row, of batches that ended while this runs.",
            ["status"],
            registry=None,
            buckets=_LATENCIES,
        )
        for status in STATUSES.values():
            self._latency.labels(status)
        with contextlib.suppress(RedisError):
            self._note_ends(server_time(connection))

    def collect(self) -> Iterable[Metric]:
        up, found = True, list[Metric]()
        try:
            with self._lock:
                now = server_time(self._connection)
                self._note_ends(now)
                found = [*self._read(now), *self._latency.collect()]
        except RedisError as error:
            # A key of another type is no outage.
            up = isinstance(error, ResponseError)
        yield GaugeMetricFamily("omlx_redis_up", "Whether Redis answers.", up)
        yield from found

    def _read(self, now: float) -> list[Metric]:
        workers = GaugeMetricFamily(
            "omlx_workers", "Workers of a model that have not fallen silent.", labels=["model_name"]
        )
        length = GaugeMetricFamily(
            "omlx_queue_length",
            "Jobs, and rows of batches, that wait in Redis for a worker.",
            labels=["model_name", "priority"],
        )
        oldest = GaugeMetricFamily(
            "omlx_queue_oldest_seconds",
            "Age of the oldest of them that is first in its queue or batch; 0 if none waits.",
            labels=["model_name"],
        )
        rows = GaugeMetricFamily(
            "omlx_batch_rows", "Rows of the batches that are open, by state.", labels=["state"]
        )
        batches = GaugeMetricFamily("omlx_batches_open", "Batches that are open.")
        runs: Any = self._connection.zrange(BATCHES_KEY, 0, -1)
        states = list(filter(None, map(self._state, runs)))
        waiting, running, dates = self._rows(states)
        models = {
            *read_models(self._connection),
            *queued_models(self._connection),
            *(model for model, _ in waiting),
        }
        for model in sorted(models):
            queued = read_waiting(self._connection, model, now)
            entries = self._connection.hgetall(workers_key(model))
            workers.add_metric([model], len(living(entries, now)))
            for name in PRIORITIES:
                count = queued.counts[name] + waiting.get((model, name), 0)
                length.add_metric([model, name], count)
            ages = [now - date for date in dates.get(model, ())]
            oldest.add_metric([model], max(0.0, queued.oldest_seconds or 0.0, *ages))
        counts = {
            "waiting": sum(waiting.values()),
            "running": running,
            "ok": sum(state.ok for state in states),
            "failed": sum(state.failed for state in states),
        }
        for state, count in counts.items():
            rows.add_metric([state], count)
        batches.add_metric([], len(states))
        return [workers, length, oldest, rows, batches]

    def _state(self, run: bytes) -> BatchState | None:
        """The state of a batch; None if it has gone or is broken."""
        batch = Batch.of_run(self._connection, str_if_bytes(run))
        with contextlib.suppress(UnknownJob, MalformedResult):
            return batch.read()
        return None

    def _rows(
        self, states: Iterable[BatchState]
    ) -> tuple[dict[tuple[str, str], int], int, dict[str, list[float]]]:
        """Rows of batches: those that wait by model and priority, how many run, and the dates of
        the first that wait by model."""
        lists = []
        for state in states:
            batch = Batch(self._connection, state.id)
            lists += [
                (named, batch.waiting_key(queue), batch.running_key(queue))
                for queue in state.queues
                if (named := read_queue_name(queue))
            ]
        if not lists:
            return {}, 0, {}
        with self._connection.pipeline(transaction=False) as pipe:
            for _, waits, runs in lists:
                pipe.llen(waits)
                pipe.hlen(runs)
            pipe.eval(_HEADS, len(lists), *(waits for _, waits, _ in lists))
            *counts, heads = pipe.execute()
        waiting, dates = dict[tuple[str, str], int](), dict[str, list[float]]()
        for (named, *_), count, head in zip(lists, counts[::2], heads, strict=True):
            waiting[named] = waiting.get(named, 0) + count
            if (date := date_seconds(head)) is not None:
                dates.setdefault(named[0], []).append(date)
        return waiting, sum(counts[1::2]), dates

    def _note_ends(self, now: float) -> None:
        """Count the batches that have ended since the last time."""
        if self._since is not None:
            ended: Any = self._connection.zrangebyscore(
                BATCHES_ENDED_KEY, f"({self._since}", "+inf"
            )
            for state in filter(None, map(self._state, ended)):
                if state.over and state.ended_at is not None:
                    self._since = max(self._since, state.ended_at)
                    seconds = state.ended_at - state.created_at
                    self._latency.labels(STATUSES[state.state]).observe(seconds)
        else:
            self._since = now
