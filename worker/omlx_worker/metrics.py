"""What a worker tells Prometheus, under vLLM's names where it has one.

Counters and gauges are read when they are scraped. What needs the moment of an event, latencies and
drafts by who made them, is noted by an observer of jobs.
"""

from __future__ import annotations

import contextlib
import logging
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from http.client import HTTPException

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omlx_producer.client.workers import Exported
from omlx_producer.metrics import QueueCollector, Sample, draw, metrics_server, scraping_client
from omlx_producer.wire import PRIORITIES
from omlx_worker.control.in_turn import ModelsInTurn
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.decode.counters import drafts_by_source
from omlx_worker.delivery.observers import OUTCOMES, JobObserver
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker")

MODEL = ["model_name"]
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_SECONDS = {
    "request_queue_time": ("From queue to claim.", _WAITS),
    "time_to_first_token": ("From queue to first token.", _WAITS),
    "e2e_request_latency": ("From queue to end, if finished.", _WAITS),
    "inter_token_latency": ("Between two steps of a row.", _STEPS),
}

_AWAY = Exported("redis_away_seconds", "Since Redis answered.")
_FAILURES = Exported("redis_failures", "Calls failed in outages.", counts=True)
_UNWRITTEN = Exported("unwritten_tokens", "Tokens that wait to be written to Redis.")
_DRAFTED = Exported("spec_decode_num_draft_tokens", "Drafts judged.", counts=True)
_ACCEPTED = Exported("spec_decode_num_accepted_tokens", "Accepted.", counts=True)
_BY_PLACE = Exported(
    "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the step.", counts=True
)


@contextlib.contextmanager
def serve_metrics(
    host: str,
    port: int,
    worker: GenerationWorker | ModelsInTurn,
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
    with scraping_client(url) as client:
        queues = QueueCollector(client)
        collectors: list[Collector]
        if isinstance(worker, GenerationWorker):
            metrics = WorkerMetrics(worker)
            worker.observers.add(metrics)
            collectors = [metrics, queues]
        else:
            collectors = [ProcessMetrics(worker, queues)]
        if gateway is not None:
            collectors.append(MultiProcessCollector(None, gateway))  # type: ignore[no-untyped-call]
        with metrics_server(host, port, *collectors) as served:
            if not worker.is_child:
                log.info("metrics are at http://%s:%d/metrics", host, served)
            yield served


class WorkerMetrics(JobObserver, Collector):
    """The figures of one worker, and of its jobs."""

    def __init__(self, worker: GenerationWorker) -> None:
        self._worker = worker
        # Those of its model's own head or draft model, and those looked up.
        self._drafts = drafts_by_source()
        self._told_at: dict[str, float] = {}
        self._seconds = {
            name: Histogram(
                f"omlx_{name}_seconds", text, [*MODEL, "priority"], registry=None, buckets=buckets
            )
            for name, (text, buckets) in _SECONDS.items()
        }
        self._finished = Counter(
            "omlx_request_success",
            "Rows that have finished.",
            [*MODEL, "finished_reason"],
            registry=None,
        )
        self._ends = Counter(
            "omlx_jobs", "Jobs that have left the worker.", [*MODEL, "outcome"], registry=None
        )
        for histogram in self._seconds.values():
            for priority in PRIORITIES:
                histogram.labels(worker.alias, priority)
        for reason in ("stop", "length", "repetition"):
            self._finished.labels(worker.alias, reason)
        for outcome in OUTCOMES:
            self._ends.labels(worker.alias, _label(outcome))

    def _note(self, name: str, claim: Claim, seconds: float) -> None:
        self._seconds[name].labels(claim.model, claim.priority).observe(seconds)

    # Hooks

    def claimed(self, claim: Claim) -> None:
        if claim.queued_seconds is not None:
            self._note("request_queue_time", claim, claim.queued_seconds)

    def first_token(self, job: ActiveJob, at: float) -> None:
        if not job.resumed_tokens:
            self._note("time_to_first_token", job.claim, _since_queued(job.claim, at))

    def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
        for job, emission in emissions:
            if emission.drafted:
                self._drafts[emission.source].add(emission)
            if emission.tokens:
                before = self._told_at.get(emission.row_id)
                self._told_at[emission.row_id] = at
                if before is not None:
                    self._note("inter_token_latency", job.claim, at - before)

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:  # noqa: ARG002
        self._ends.labels(claim.model, _label(outcome)).inc()
        if job is None:
            return
        for row in job.rows:
            self._told_at.pop(row.row_id, None)
        if outcome == "finished":
            self._note("e2e_request_latency", claim, _since_queued(claim, time.monotonic()))
            for reason in job.finish_reasons:
                self._finished.labels(claim.model, reason).inc()

    # Scrapes

    def collect(self) -> Iterable[Metric]:
        for noted in (*self._seconds.values(), self._finished, self._ends):
            yield from noted.collect()
        yield from draw(self._samples())

    def _samples(self) -> Iterator[Sample]:
        worker = self._worker
        named = {MODEL[0]: worker.alias}
        yield _AWAY, named, worker.redis_away
        yield _FAILURES, named, worker.redis_failures
        yield _UNWRITTEN, named, worker.decode_thread.outbox.waiting
        for source, counts in self._drafts.items():
            drafts, by_place = {**named, "source": source}, list(counts.accepted)
            yield _DRAFTED, drafts, counts.drafted
            yield _ACCEPTED, drafts, sum(by_place)
            for place, count in enumerate(by_place or [0]):
                yield _BY_PLACE, {**drafts, "position": str(place)}, count
        for exported, figure in worker.board.figures().exported().items():
            kind = {"kind": exported.kind} if exported.kind else {}
            yield exported, named | kind, figure


class ProcessMetrics(Collector):
    """The metrics of the process that serves one of several models, and what it tells of Redis.

    Args:
        queues: tells of Redis while no process does.
    """

    def __init__(self, worker: ModelsInTurn, queues: QueueCollector) -> None:
        self._worker = worker
        self._queues = queues

    def collect(self) -> Iterable[Metric]:
        try:
            with urllib.request.urlopen(self._worker.metrics_url, timeout=5) as answer:
                text = answer.read().decode()
        except (OSError, ValueError, HTTPException):
            return self._queues.collect()
        return text_string_to_metric_families(text)


def _since_queued(claim: Claim, at: float) -> float:
    return max(0.0, at - claim.claimed_at) + (claim.queued_seconds or 0.0)


def _label(outcome: str) -> str:
    return outcome.replace(" ", "_")
