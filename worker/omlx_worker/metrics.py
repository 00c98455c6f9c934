"""What a worker tells Prometheus, under vLLM's names where it has one.

Counters and gauges are read when they are scraped. What needs the moment of an event, latencies and
drafts by who made them, is noted by an observer of jobs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from omlx_producer.client.workers import Exported
from omlx_producer.metrics import QueueCollector, metrics_server, scraping_client
from omlx_producer.wire import PRIORITIES
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.decode.counters import DraftCounts
from omlx_worker.delivery.observers import OUTCOMES, JobObserver
from omlx_worker.engine.rows.row import SOURCES, Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker")

MODEL = ["model_name"]
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)


@contextlib.contextmanager
def serve_metrics(
    host: str,
    port: int,
    worker: GenerationWorker,
    alias: str,
    url: str,
    gateway: str | None = None,
) -> Iterator[int]:
    """Serve the metrics of a worker, its gateway and its Redis until the block ends.

    Yields the port.

    Args:
        url: of Redis.
        gateway: the folder that a gateway shares its metrics in; see `serve_http`.

    Raises:
        OmlxQueueError: if nothing can be served there.
    """
    metrics = WorkerMetrics(worker, alias)
    worker.observers.add(metrics)
    with scraping_client(url) as client:
        collectors: list[Collector] = [metrics, QueueCollector(client)]
        if gateway is not None:
            collectors.append(MultiProcessCollector(None, gateway))  # type: ignore[no-untyped-call]
        with metrics_server(host, port, *collectors) as served:
            log.info("metrics are at http://%s:%d/metrics", host, served)
            yield served


class WorkerMetrics(JobObserver, Collector):
    """The figures of one worker, and of its jobs."""

    def __init__(self, worker: GenerationWorker, model: str) -> None:
        self._worker = worker
        self._model = model
        # Of the model or its draft model, and looked up.
        self._drafts = {source: DraftCounts() for source in SOURCES}
        self._told_at: dict[str, float] = {}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                f"omlx_{name}", text, [*MODEL, "priority"], registry=None, buckets=buckets
            )

        self._queued = histogram(
            "request_queue_time_seconds", "From queue to claim.", _WAIT_BUCKETS
        )
        self._first = histogram(
            "time_to_first_token_seconds", "From queue to first token.", _WAIT_BUCKETS
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "From queue to end, if finished.", _WAIT_BUCKETS
        )
        self._gaps = histogram(
            "inter_token_latency_seconds", "Between two steps of a row.", _STEP_BUCKETS
        )
        self._finished = Counter(
            "omlx_request_success",
            "Rows that have finished.",
            [*MODEL, "finished_reason"],
            registry=None,
        )
        self._ends = Counter(
            "omlx_jobs", "Jobs that have left the worker.", [*MODEL, "outcome"], registry=None
        )
        self._kept = (
            *(self._queued, self._first, self._latency, self._gaps),
            *(self._finished, self._ends),
        )
        self._gap: dict[str, Histogram] = {
            name: self._gaps.labels(model, name) for name in PRIORITIES
        }
        for priority in PRIORITIES:
            for kept in (self._queued, self._first, self._latency):
                kept.labels(model, priority)
        for reason in ("stop", "length", "repetition"):
            self._finished.labels(model, reason)
        for outcome in OUTCOMES:
            self._ends.labels(model, _label(outcome))

    # Hooks

    def claimed(self, claim: Claim) -> None:
        if claim.queued_seconds is not None:
            self._queued.labels(self._model, claim.priority).observe(claim.queued_seconds)

    def first_token(self, job: ActiveJob, at: float) -> None:
        if not job.resumed_tokens:
            seconds = _since_queued(job.claim, at)
            self._first.labels(self._model, job.claim.priority).observe(seconds)

    def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
        for job, emission in emissions:
            if emission.drafted:
                self._drafts[emission.source].add(emission)
            if emission.tokens:
                before = self._told_at.get(emission.row_id)
                self._told_at[emission.row_id] = at
                if before is not None:
                    self._gap[job.claim.priority].observe(at - before)

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:  # noqa: ARG002
        self._ends.labels(self._model, _label(outcome)).inc()
        if job is None:
            return
        for row in job.rows:
            self._told_at.pop(row.row_id, None)
        if outcome == "finished":
            seconds = _since_queued(claim, time.monotonic())
            self._latency.labels(self._model, claim.priority).observe(seconds)
            for reason in job.finish_reasons:
                self._finished.labels(self._model, reason).inc()

    # Scrapes

    def collect(self) -> Iterable[Metric]:
        for kept in self._kept:
            yield from kept.collect()
        worker = self._worker
        yield from self._told(
            {
                Exported("redis_away_seconds", "Since Redis answered."): worker.redis_away,
                Exported("redis_failures", "Calls failed in outages.", counts=True): (
                    worker.redis_failures
                ),
                Exported("unwritten_tokens", "Tokens that wait to be written to Redis."): (
                    worker.decode_thread.outbox.waiting
                ),
            }
        )
        yield from self._drafting()
        if worker.board is not None:
            yield from self._told(worker.board.figures().exported())

    def _told(self, figures: Mapping[Exported, float]) -> Iterable[Metric]:
        families = dict[str, CounterMetricFamily | GaugeMetricFamily]()
        for exported, figure in figures.items():
            name, kinds = f"omlx_{exported.name}", ["kind"] if exported.kind else []
            make = CounterMetricFamily if exported.counts else GaugeMetricFamily
            family = families.setdefault(name, make(name, exported.text, labels=[*MODEL, *kinds]))
            family.add_metric([self._model, exported.kind][: 1 + len(kinds)], figure)
        return families.values()

    def _drafting(self) -> Iterator[Metric]:
        name, labels = "omlx_spec_decode_num", [*MODEL, "source"]
        drafted = CounterMetricFamily(f"{name}_draft_tokens", "Drafts judged.", labels=labels)
        accepted = CounterMetricFamily(f"{name}_accepted_tokens", "Accepted.", labels=labels)
        places = CounterMetricFamily(
            f"{name}_accepted_tokens_per_pos",
            "Accepted, by place in the step.",
            labels=[*labels, "position"],
        )
        for source, counts in self._drafts.items():
            drafted.add_metric([self._model, source], counts.drafted)
            by_place = list(counts.accepted)
            accepted.add_metric([self._model, source], sum(by_place))
            for place, count in enumerate(by_place or [0]):
                places.add_metric([self._model, source, str(place)], count)
        yield from (drafted, accepted, places)


def _since_queued(claim: Claim, at: float) -> float:
    return max(0.0, at - claim.claimed_at) + (claim.queued_seconds or 0.0)


def _label(outcome: str) -> str:
    return outcome.replace(" ", "_")
