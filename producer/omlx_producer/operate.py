"""What an operator does: list batches, pause models, drain workers, delete."""

from __future__ import annotations

import redis
from redis.utils import str_if_bytes
from rq.command import send_command, send_shutdown_command

from omlx_producer.bulk.batch import Batch, BatchState, is_batch_id, read_batches
from omlx_producer.client.models import read_models
from omlx_producer.client.outcome import fetch_job
from omlx_producer.errors import InvalidRequest, ModelNotFound
from omlx_producer.figures import queued_models, read_figures
from omlx_producer.wire import events_key, wake_channel
from omlx_producer.wire.keys import PAUSED_KEY, batch_key

# A wake-up for this many jobs makes every worker look.
EVERYBODY = 10**6
_ROW_PREFIX = "row-"


def find_batches(connection: redis.Redis) -> list[BatchState]:
    """All batches and runs, the newest first. Looks through the keys of the server."""
    pattern = batch_key("[0-9a-f]" * 12)
    keys = connection.scan_iter(pattern, count=1000, _type="hash")
    states = read_batches(connection, (str_if_bytes(key).rpartition(":")[2] for key in keys))
    return sorted(states, key=lambda state: -state.created_at)


def batch_bytes(connection: redis.Redis, state: BatchState) -> int:
    """The bytes that a batch takes in Redis, about."""
    batch = Batch(connection, state.id)
    keys = [batch.key, batch.results_key]
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
    batch.delete(state.queues, tell=True)
