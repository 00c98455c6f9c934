"""Looking at a queue, and doing things while something else waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer


def fetch(connection: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


def queued(connection: redis.Redis, queue: str = "omlx:demo:default") -> list[str]:
    return Queue(queue, connection=connection, serializer=JSONSerializer).job_ids


def later(work: Any, seconds: float = 0.2) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread
