"""Put jobs into their queues, all of a batch at one moment and exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from redis.client import Pipeline
from redis.exceptions import WatchError
from rq import Queue
from rq.job import Job

from omlx_producer.protocol import (
    JOB_FUNCTION,
    GenerationRequest,
    Priority,
    queue_name,
    wake_channel,
)

JOB_SECONDS = 3600
RESULT_SECONDS = 24 * 3600
FAILURE_SECONDS = 7 * 24 * 3600
DESCRIPTION_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a job may run, and for which its result or its failure is kept."""

    job_timeout: int = JOB_SECONDS
    result_ttl: int = RESULT_SECONDS
    failure_ttl: int = FAILURE_SECONDS


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked request on its way into a queue."""

    id: str
    request: GenerationRequest
    priority: Priority

    @property
    def queue(self) -> str:
        return queue_name(self.request.model, self.priority)


def enqueue(
    connection: redis.Redis,
    jobs: Sequence[NewJob],
    limits: Limits,
    open_queue: Callable[[str], Queue],
) -> None:
    """Enqueue jobs and ring for their workers.

    redis-py repeats a command whose answer was lost, which would enqueue the jobs twice; a
    watched pipeline raises WatchError instead, and then the first job tells what happened.
    """
    first, lost_answer = Job.key_for(jobs[0].id), False
    while True:
        with connection.pipeline() as pipe:
            pipe.watch(first)  # type: ignore[no-untyped-call]
            if lost_answer and pipe.exists(first):
                return
            pipe.multi()
            _fill(pipe, jobs, limits, open_queue)
            try:
                pipe.execute()
            except WatchError:
                lost_answer = True
                continue
            return


def _fill(
    pipe: Pipeline, jobs: Sequence[NewJob], limits: Limits, open_queue: Callable[[str], Queue]
) -> None:
    by_queue: dict[str, list[NewJob]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    for name, members in by_queue.items():
        data = [
            Queue.prepare_data(
                JOB_FUNCTION,
                kwargs={"request": job.request.to_wire()},
                job_id=job.id,
                description=_describe(job.request),
                timeout=limits.job_timeout,
                result_ttl=limits.result_ttl,
                failure_ttl=limits.failure_ttl,
            )
            for job in members
        ]
        open_queue(name).enqueue_many(data, pipeline=pipe)
        pipe.publish(wake_channel(members[0].request.model), len(members))


def _describe(request: GenerationRequest) -> str:
    """A line for dashboards. RQ's own would hold the whole request a second time."""
    if isinstance(request.prompt, list):
        text = f"{len(request.prompt)} tokens"
    else:
        text = request.prompt or (request.messages or [])[-1].text
    return f"{request.model}: {' '.join(text[:DESCRIPTION_CHARACTERS].split())}"
