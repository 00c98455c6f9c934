"""Fixtures of a producer on the session's server, where one model is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer import JobHandle, Producer
from tests.helpers.fake_worker import FakeWorker, announce


@pytest.fixture
def producer(connection: redis.Redis) -> Producer:
    announce(connection)
    return Producer(connection)


@pytest.fixture
def job(producer: Producer) -> JobHandle:
    return producer.submit(prompt="def fibonacci(n):")


@pytest.fixture
def worker(connection: redis.Redis, job: JobHandle) -> FakeWorker:
    fake = FakeWorker(connection, job.id)
    fake.start()
    return fake


@pytest.fixture
def served(connection: redis.Redis) -> Iterator[dict[str, Any]]:
    """A worker that answers every job with two steps for each of its choices.

    What is put under ``error`` makes it fail; the last request appears under ``request``.
    """
    order: dict[str, Any] = {}
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for key in connection.scan_iter(f"{RQ}:job:*"):
                job_id = key.decode().removeprefix(f"{RQ}:job:")
                job = Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
                if job.get_status(refresh=False) == "queued":
                    answer(FakeWorker(connection, job_id), job.kwargs["request"])
            time.sleep(0.01)

    def answer(worker: FakeWorker, request: dict[str, Any]) -> None:
        order["request"] = request
        worker.start()
        if "error" in order:
            worker.fail(order["error"])
            return
        streams = request.get("stream", True)
        for choice in range(request.get("n", 1)):
            for text in (f"hello {choice},", " wörld"):
                if streams:
                    worker.step(text, choice=choice)
                else:
                    worker.texts[choice] = worker.texts.get(choice, "") + text
        worker.finish(n=None if streams else 2)

    thread = threading.Thread(target=serve)
    thread.start()
    yield order
    stop.set()
    thread.join()
