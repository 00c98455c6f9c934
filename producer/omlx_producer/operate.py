"""What an operator does: list jobs and batches, pause models, drain workers, requeue, delete."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import redis
from redis.utils import str_if_bytes
from rq.command import send_command, send_shutdown_command
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)

from omlx_producer.bulk.batch import Batch, BatchState, is_batch_id, read_batches
from omlx_producer.client.models import read_models
from omlx_producer.client.outcome import ENDINGS, Status, fetch_job
from omlx_producer.connection import server_time
from omlx_producer.errors import InvalidRequest, ModelNotFound
from omlx_producer.figures import date_seconds, queue_key, queued_models, read_figures
from omlx_producer.lua import load
from omlx_producer.wire import (
    PRIORITIES,
    Priority,
    events_key,
    queue_name,
    read_queue_name,
    wake_channel,
)
from omlx_producer.wire.keys import PAUSED_KEY, batch_key, batch_rows_key

STATUSES: tuple[Status, ...] = ("queued", "started", "finished", "failed", "cancelled")
PAGE = 500
# A wake-up for this many jobs makes every worker look.
EVERYBODY = 10**6
_ROW_PREFIX = "row-"

# Where jobs are, in the order of a list: RQ's registry, whether its newest job is the last one, and
# what its jobs may be. None is the queue itself.
_PLACES: tuple[tuple[type[BaseRegistry] | None, bool, set[str]], ...] = (
    (StartedJobRegistry, False, {"started"}),
    (None, False, {"queued"}),
    (FailedJobRegistry, True, {"failed", "cancelled"}),
    (CanceledJobRegistry, True, {"cancelled"}),
    (FinishedJobRegistry, True, {"finished"}),
)


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job in a list.

    Attributes:
        seconds: for how long it has been in its state; None if its record does not say.
        worker: of a job that runs or has run.
    """

    id: str
    state: Status
    model: str
    priority: Priority
    seconds: float | None
    worker: str | None


def read_jobs(
    connection: redis.Redis,
    states: Collection[Status] = STATUSES,
    model: str | None = None,
    older_than: float = 0.0,
) -> Iterator[ListedJob]:
    """The jobs that run, that wait in the order of their queues, and that have ended.

    Ended ones come last, the newest first. Rows of batches are jobs only while they run. Jobs that
    come or go meanwhile may be missing.

    Args:
        model: an alias; all by default.
        older_than: seconds in its state, at least.
    """
    now = server_time(connection)
    known = {*read_models(connection), *queued_models(connection)} if model is None else {model}
    seen = set[str]()
    for registry, backwards, possible in _PLACES:
        if possible.isdisjoint(states):
            continue
        for alias in sorted(known):
            for priority in PRIORITIES:
                for page in _pages(connection, registry, backwards, alias, priority):
                    new = [job_id for job_id in dict.fromkeys(page) if job_id not in seen]
                    seen.update(new)
                    for job in _look_up(connection, new, now):
                        if job.state in states and (job.seconds or 0.0) >= older_than:
                            yield job


def _pages(
    connection: redis.Redis,
    registry: type[BaseRegistry] | None,
    backwards: bool,
    model: str,
    priority: Priority,
) -> Iterator[list[str]]:
    """The ids of the jobs in one place."""
    start, queue = 0, queue_name(model, priority)
    while True:
        entries: Any
        if registry is None:
            entries = connection.lrange(queue_key(queue), start, start + PAGE - 1)
        else:
            key = registry(queue, connection=connection).key
            entries = connection.zrange(key, start, start + PAGE - 1, desc=backwards)
        # An entry of a job that runs is its id and that of its execution.
        yield [str_if_bytes(entry).partition(":")[0] for entry in entries]
        start += PAGE
        if len(entries) < PAGE:
            return


def _look_up(connection: redis.Redis, ids: list[str], now: float) -> Iterator[ListedJob]:
    names = ("status", "origin", "worker_name", "enqueued_at", "started_at", "ended_at")
    with connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(Job.key_for(job_id), names)
        found = pipe.execute()
    for job_id, (status, origin, worker, enqueued, started, ended) in zip(ids, found, strict=True):
        queue = read_queue_name(str_if_bytes(origin or b""))
        if status is None or queue is None:
            continue
        rq_status = str_if_bytes(status)
        state: Status = ENDINGS.get(rq_status) or (
            "started" if rq_status == "started" else "queued"
        )
        dates = {"queued": (enqueued,), "started": (started,)}.get(state, (ended, enqueued))
        times = [at for at in map(date_seconds, dates) if at is not None]
        yield ListedJob(
            id=job_id,
            state=state,
            model=queue[0],
            priority=queue[1],
            seconds=round(max(0.0, now - times[0]), 1) if times else None,
            worker=str_if_bytes(worker) if worker else None,
        )


def find_batches(connection: redis.Redis) -> list[BatchState]:
    """All batches and runs, the newest first. Looks through the keys of the server."""
    pattern = batch_key("[0-9a-f]" * 12)
    keys = connection.scan_iter(pattern, count=1000, _type="hash")
    states = read_batches(connection, (str_if_bytes(key).rpartition(":")[2] for key in keys))
    return sorted(states, key=lambda state: -state.created_at)


def batch_bytes(connection: redis.Redis, state: BatchState) -> int:
    """The bytes that a batch takes in Redis, about."""
    batch = Batch(connection, state.id)
    keys = [batch.key, batch.results_key, batch.ended_key, batch_rows_key(batch.run)]
    for queue in state.queues:
        keys += [batch.waiting_key(queue), batch.running_key(queue)]
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.memory_usage(key)
        return sum(size or 0 for size in pipe.execute())


def pause_model(connection: redis.Redis, model: str) -> bool:
    """Let the workers of a model take no new jobs; what runs goes on.

    Returns:
        whether it was not paused yet.

    Raises:
        ModelNotFound: if no worker has announced it and no job waits for it.
    """
    _require_known(connection, model)
    return bool(connection.sadd(PAUSED_KEY, model))


def resume_model(connection: redis.Redis, model: str) -> bool:
    """Let the workers of a paused model take jobs again.

    Returns:
        whether it was paused.

    Raises:
        ModelNotFound: if it was not, no worker has announced it and no job waits for it.
    """
    was_paused = bool(connection.srem(PAUSED_KEY, model))
    if was_paused:
        connection.publish(wake_channel(model), EVERYBODY)
    else:
        _require_known(connection, model)
    return was_paused


def _require_known(connection: redis.Redis, model: str) -> None:
    known = {*read_models(connection), *queued_models(connection)}
    if model not in known:
        spelled = ", ".join(sorted(known)) or "none"
        got = f"got {model!r}, which nobody serves (known: {spelled})"
        raise ModelNotFound("model", got, "give a known one, or start a worker that serves it")


def drain_worker(connection: redis.Redis, worker: str) -> bool:
    """Tell a worker to take no new jobs, to finish those that it has, and to end.

    Returns:
        whether it was not draining yet.

    Raises:
        InvalidRequest: if no living worker has this name.
    """
    living = {each.name: each for model in read_figures(connection) for each in model.workers}
    if worker not in living:
        names = ", ".join(living) or "none"
        got = f"got {worker!r}, which is not running (running: {names})"
        raise InvalidRequest("worker", got, "give one that runs, as omlx-submit status names it")
    send_shutdown_command(connection, worker)
    return living[worker].state != "draining"


def requeue_job(connection: redis.Redis, job_id: str) -> None:
    """Put a failed or stopped job back into its queue.

    Raises:
        UnknownJob: if it does not exist.
        InvalidRequest: if it has not failed.
    """
    job = fetch_job(connection, job_id)
    try:
        job.requeue()
    except InvalidJobOperation:
        status = job.get_status(refresh=False).value
        raise InvalidRequest(
            None, f"{job_id}: is {status}", "only failed jobs can be requeued"
        ) from None
    if queue := read_queue_name(job.origin):
        connection.publish(wake_channel(queue[0]), 1)


def delete_by_id(connection: redis.Redis, job_id: str) -> None:
    """Delete a job or a batch with all that it has produced. What runs of it is stopped.

    Args:
        job_id: of a job or a batch.

    Raises:
        UnknownJob: if it does not exist.
        InvalidRequest: if it is the row of a batch, which would run again.
    """
    if job_id.startswith("batch-") or is_batch_id(job_id):
        _delete_batch(Batch(connection, job_id))
        return
    job = fetch_job(connection, job_id)
    if job_id.startswith(_ROW_PREFIX):
        raise InvalidRequest(None, f"{job_id}: is a row of a batch", "cancel or delete the batch")
    runs = job.get_status(refresh=False).value == "started"
    job.delete()
    connection.delete(events_key(job_id))
    if runs and job.worker_name:
        send_command(connection, job.worker_name, "stop-job", job_id=job_id)


def _delete_batch(batch: Batch) -> None:
    state = batch.read(broken=True)
    # Its running rows stop at once, not when their worker renews its leases.
    batch.cancel()
    load(batch.connection, "delete")(args=[batch.run, *state.queues])
