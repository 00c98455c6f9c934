"""Endings by RQ's handlers: dependents, callbacks, webhooks, ``Retry``, ``Repeat``.

Only this module calls RQ's handlers, so a new RQ changes only this module. The transaction in which
RQ ends a job watches the lease and fails if a sweep takes the job away meanwhile. After a lost
answer the lease shows what happened: if it is gone, the transaction succeeded.

Callbacks take time, so endings run one by one on a thread of their own. The traffic thread renews
the leases meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial
from typing import Any

from redis.client import Pipeline
from redis.exceptions import ConnectionError, RedisError, WatchError
from rq import Queue
from rq.callbacks import (
    execute_failure_callback,
    execute_stopped_callback,
    execute_success_callback,
)
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import as_text

from omlx_producer.cancel import STOP_FIELD
from omlx_producer.outage import passes
from omlx_producer.outcome import write_stream_end
from omlx_producer.protocol import FailedEvent
from omlx_worker.control.callbacks import CallbackFailed, ServedJob
from omlx_worker.control.rq_record import RecordedWorker
from omlx_worker.delivery.job_log import log_end
from omlx_worker.messages import NeedsRQ
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Ending
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.control.rq_endings")


class GenerationFailed(Exception):
    """Passed to failure callbacks; the message is the sentence of the failed job."""


class LeaseGone(Exception):
    """The lease is gone: another worker has the job, or it has ended."""


class FencedQueue(Queue):
    """A queue that moves dependents only for a lease holder.

    RQ calls it first in each try of the transaction that ends a job, while keys can be watched.
    """

    fence: Callable[[Pipeline], None]

    def move_dependents_to_ready(
        self, job: Job, pipeline: Pipeline | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, list[str]]:
        if pipeline is not None:
            self.fence(pipeline)
            # RQ would move a dependent that is cancelled after it was read.
            for dependent in pipeline.smembers(job.dependents_key):
                pipeline.watch(Job.key_for(as_text(dependent)))  # type: ignore[no-untyped-call]
        return super().move_dependents_to_ready(job, pipeline, *args, **kwargs)


class RQEndings:
    """The endings that RQ's handlers must write, one after the other. For the main thread.

    Args:
        webhook_hosts: the hosts that webhooks may call.
        on_ended: called on another thread after each ending.
    """

    def __init__(
        self,
        worker: RecordedWorker,
        leases: LeaseTable,
        webhook_hosts: Collection[str],
        on_ended: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._leases = leases
        self._webhook_hosts = webhook_hosts
        self._on_ended = on_ended
        self._waiting: deque[NeedsRQ] = deque()
        self._running: Future[Ending | None] | None = None
        self._thread = ThreadPoolExecutor(1, "omlx-endings")

    def add(self, due: NeedsRQ) -> None:
        due.claim.ending = True
        self._waiting.append(due)

    def advance(self) -> None:
        """Begin the next ending, if none is being written.

        Raises:
            redis.exceptions.RedisError: if Redis did not take the last one, which begins again at
                the next call.
        """
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            written = ended.result()
            due = self._waiting.popleft()
            if written:
                log_end(due.claim, due.job, written.status, written.sentence)
        if self._waiting and self._running is None:
            due = self._waiting[0]
            call = partial(end_through_rq, self._worker, self._leases, due.claim, due.ending)
            self._running = self._thread.submit(call, self._webhook_hosts)
            self._running.add_done_callback(lambda _: self._on_ended())

    def close(self, seconds: float) -> None:
        """Write endings for a while, or until Redis does not take one.

        Jobs whose callbacks take longer stay in the table, to be given back.
        """
        until = time.monotonic() + seconds
        try:
            self.advance()
            while self._running is not None and (left := until - time.monotonic()) > 0:
                self._leases.renew()
                wait([self._running], min(left, self._leases.seconds / 4))
                self.advance()
        except RedisError as error:
            log.warning("Redis does not take an ending by RQ's handlers (%s)", error)
        self._thread.shutdown(wait=False)


def end_through_rq(
    worker: RecordedWorker,
    leases: LeaseTable,
    claim: Claim,
    ending: Ending,
    webhook_hosts: Collection[str],
) -> Ending | None:
    """End a job as RQ's worker does, callbacks and webhooks included.

    Returns:
        the ending that was written; None if the lease was gone.
    """
    if not leases.holds(claim):
        return None
    if leases.renew([claim]):
        log.warning("job %s is no longer this worker's; its ending is dropped", claim.id)
        leases.lose(claim)
        return None
    worker.fence = partial(_watch, worker, leases, claim, ending)
    try:
        job = ServedJob(claim.id, worker.connection, JSONSerializer)
        job.webhook_hosts = webhook_hosts
        job.refresh()  # type: ignore[no-untyped-call]
        job.ended_at = datetime.now(UTC)
        if ending.status == "finished":
            ending = _succeed(worker, leases, claim, job, ending)
        if ending.status != "finished":
            _fail(worker, leases, claim, job, ending)
    except LeaseGone:
        log.info("job %s has ended, or is no longer this worker's", claim.id)
        leases.lose(claim)
        return None
    except WatchError as error:
        raise ConnectionError(f"the ending of job {claim.id} may not have arrived") from error
    except Exception as error:
        if passes(error):
            # The job stays held and ends after the outage; callbacks are then called again.
            raise
        # RQ cannot read the job hash; the job may have been written by hand.
        said = "RQ's handlers cannot end job %s (%s: %s); ending it without them"
        log.error(
            said, claim.id, type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG)
        )
        # Redis does not roll back: dependents may be ready already.
        with worker.extras.attempt("the ready dependents"):
            _queue(worker, claim).ready_job_registry.cleanup()
        leases.commit([(claim, ending)], force=True)
    finally:
        worker.on_ending = worker.fence = worker._stopped_job_id = None
    leases.forget(claim)
    return ending


def _succeed(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, job: ServedJob, ending: Ending
) -> Ending:
    """Returns the ending. A success callback that raises turns it into a failure."""
    job._status = JobStatus.FINISHED
    job._result = ending.result
    try:
        job.call(execute_success_callback, ending.result)
    except CallbackFailed as error:
        log.exception("the success callback of job %s failed", job.id)
        sentence = f"the success callback failed: {error}"
        event = FailedEvent(job_id=job.id, n=ending.event.n, error=sentence)
        return Ending("failed", event)
    if leases.renew([claim]):
        raise LeaseGone
    queue = _queue(worker, claim)
    ttl = job.get_result_ttl(worker.default_result_ttl)
    worker.on_ending = _announce(leases, job, ending, ttl)
    worker.handle_job_success(job, queue, queue.started_job_registry, _execution(worker, claim))
    job.send_webhooks(JobStatus.FINISHED)
    return ending


def _fail(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, job: ServedJob, ending: Ending
) -> None:
    stopped = ending.status == "stopped"
    job._status = JobStatus.FAILED
    if not ending.retry:
        job.retries_left = 0
    try:
        if stopped:
            worker._stopped_job_id = job.id
            job.call(execute_stopped_callback)
        else:
            error = GenerationFailed(ending.sentence)
            job.call(execute_failure_callback, type(error), error, None)
    except CallbackFailed:
        log.exception("a callback of job %s failed", job.id)
    if leases.renew([claim]):
        raise LeaseGone
    if stopped or not job.should_retry:
        worker.on_ending = _announce(leases, job, ending)
    worker.handle_job_failure(
        job,
        _queue(worker, claim),
        exc_string=ending.sentence,
        execution=_execution(worker, claim),
    )
    if not leases.renew([claim]):
        # RQ only logs errors here.
        raise ConnectionError(f"the failure of job {claim.id} has not arrived")


def _watch(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, ending: Ending, pipeline: Pipeline
) -> None:
    """Make the next transaction fail if the lease ends before it, or the server restarts.

    RQ then tries again, and the tokens that the server has lost are written again first.

    Raises:
        LeaseGone: if the lease has already ended.
    """
    execution = _execution(worker, claim)
    pipeline.watch(execution.key)  # type: ignore[no-untyped-call]
    started = StartedJobRegistry(claim.queue, connection=worker.connection)
    if pipeline.zscore(started.key, execution.composite_key) is None:
        raise LeaseGone
    leases.restore(claim, ending)


def _queue(worker: RecordedWorker, claim: Claim) -> FencedQueue:
    queue = FencedQueue(claim.queue, connection=worker.connection, serializer=JSONSerializer)
    assert worker.fence is not None
    queue.fence = worker.fence
    return queue


def _announce(
    leases: LeaseTable, job: Job, ending: Ending, ttl: int | None = None
) -> Callable[[Pipeline], None]:
    """Adds the terminal event to the transaction that ends a job, or one of its repeats.

    Args:
        ttl: seconds until the result expires, if there is one.
    """
    repeats = bool(job.repeats_left)
    keep_for = ttl if ttl and ttl > 0 else leases.stream_ttl

    def write(pipeline: Pipeline) -> None:
        write_stream_end(pipeline, ending.event, keep_for=keep_for)
        if not repeats:
            pipeline.hdel(job.key, STOP_FIELD)

    return write


def _execution(worker: RecordedWorker, claim: Claim) -> Execution:
    execution = Execution(claim.execution, claim.id, worker.connection, worker.name)
    execution.created_at = datetime.fromtimestamp(claim.started_at, UTC)
    return execution
