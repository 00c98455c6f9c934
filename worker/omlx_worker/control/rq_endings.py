"""Endings by RQ's handlers: dependents, callbacks, webhooks, ``Retry``, ``Repeat``.

Only this module calls RQ's handlers, so a new RQ changes only this module. The transaction in which
RQ ends a job watches the lease and fails if a sweep takes the job away meanwhile. After a lost
answer the lease shows what happened: if it is gone, the transaction succeeded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from redis.client import Pipeline
from redis.exceptions import ConnectionError, WatchError
from rq import Queue
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty, TimerDeathPenalty, UnixSignalDeathPenalty
from rq.utils import as_text

from omlx_producer.cancel import STOP_FIELD
from omlx_producer.outage import passes
from omlx_producer.outcome import write_stream_end
from omlx_producer.protocol import FailedEvent
from omlx_worker.control.rq_record import RecordedWorker
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Ending
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.control.rq_endings")


class GenerationFailed(Exception):
    """Passed to failure callbacks; the message is the sentence of the failed job."""


class LeaseGone(Exception):
    """The lease is gone: another worker has the job, or it has ended."""


class FencedQueue(Queue):
    """A queue that enqueues dependents only for a lease holder.

    RQ calls it first in each try of the transaction that ends a job, while keys can be watched.
    """

    fence: Callable[[Pipeline], None]

    def enqueue_dependents(
        self, job: Job, pipeline: Pipeline | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if pipeline is not None:
            self.fence(pipeline)
            # RQ would enqueue a dependent that is cancelled after it was read.
            for dependent in pipeline.smembers(job.dependents_key):
                pipeline.watch(Job.key_for(as_text(dependent)))  # type: ignore[no-untyped-call]
        super().enqueue_dependents(job, pipeline, *args, **kwargs)


def end_through_rq(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, ending: Ending
) -> None:
    """End a job as RQ's worker does, callbacks included. Runs on the main thread."""
    if not leases.holds(claim):
        return
    if leases.renew([claim]):
        log.warning("job %s is no longer this worker's; its ending is dropped", claim.id)
        leases.forget(claim)
        return
    try:
        job = Job.fetch(claim.id, connection=worker.connection, serializer=JSONSerializer)
        job.ended_at = datetime.now(UTC)
        worker.execution = _execution(worker, claim)
        worker.fence = lambda pipeline: _watch(pipeline, leases, claim, ending)
        if ending.status == "finished":
            ending = _succeed(worker, leases, claim, job, ending)
        if ending.status != "finished":
            _fail(worker, leases, claim, job, ending)
    except LeaseGone:
        log.info("job %s has ended, or is no longer this worker's", claim.id)
    except WatchError as error:
        raise ConnectionError(f"the ending of job {claim.id} may not have arrived") from error
    except Exception as error:
        if passes(error):
            # The job stays held and ends after the outage; callbacks are then called again.
            raise
        # RQ cannot read the job hash; the job may have been written by hand.
        log.exception("RQ's handlers cannot end job %s; ending it without them", claim.id)
        leases.commit([(claim, ending)], force=True)
    finally:
        worker.execution = worker.on_ending = worker.fence = None
    leases.forget(claim)


def _succeed(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, job: Job, ending: Ending
) -> Ending:
    """Returns the ending. A success callback that raises turns it into a failure."""
    job._status = JobStatus.FINISHED
    job._result = ending.result
    try:
        job.execute_success_callback(_death_penalty(), ending.result)
    except Exception as error:
        log.exception("the success callback of job %s failed", job.id)
        sentence = f"the success callback failed: {type(error).__name__}: {error}"
        event = FailedEvent(job_id=job.id, n=ending.event.n, error=sentence)
        return Ending("failed", event)
    if leases.renew([claim]):
        return ending
    queue = _queue(worker, claim)
    ttl = job.get_result_ttl(worker.default_result_ttl)
    worker.on_ending = _announce(leases, job, ending, ttl)
    worker.handle_job_success(job, queue, queue.started_job_registry)
    job.send_webhooks(JobStatus.FINISHED)
    return ending


def _fail(
    worker: RecordedWorker, leases: LeaseTable, claim: Claim, job: Job, ending: Ending
) -> None:
    stopped = ending.status == "stopped"
    job._status = JobStatus.FAILED
    if not ending.retry:
        job.retries_left = 0
    try:
        if stopped:
            worker._stopped_job_id = job.id
            job.execute_stopped_callback(_death_penalty())
        else:
            error = GenerationFailed(ending.sentence)
            job.execute_failure_callback(_death_penalty(), type(error), error, None)
    except Exception:
        log.exception("a callback of job %s failed", job.id)
    if leases.renew([claim]):
        return
    if stopped or not job.should_retry:
        worker.on_ending = _announce(leases, job, ending)
    worker.handle_job_failure(job, _queue(worker, claim), exc_string=ending.sentence)
    if not leases.renew([claim]):
        # RQ only logs errors here.
        raise ConnectionError(f"the failure of job {claim.id} has not arrived")


def _watch(pipeline: Pipeline, leases: LeaseTable, claim: Claim, ending: Ending) -> None:
    """Make the next transaction fail if the lease ends before it, or the server restarts.

    RQ then tries again, and the tokens that the server has lost are written again first.

    Raises:
        LeaseGone: if the lease has already ended.
    """
    execution = f"{claim.id}:{claim.execution}"
    pipeline.watch(f"rq:execution:{execution}")  # type: ignore[no-untyped-call]
    if pipeline.zscore(f"rq:wip:{claim.queue}", execution) is None:
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


def _death_penalty() -> type[BaseDeathPenalty]:
    """RQ's time limit for callbacks. The one by signals works on the main thread only."""
    on_main = threading.current_thread() is threading.main_thread()
    return UnixSignalDeathPenalty if on_main else TimerDeathPenalty
