"""Workers for tests: on a thread of the test, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from click.testing import CliRunner
from redis import Redis
from rq import Queue
from rq.cli import main as rq_cli
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from omlx_producer.wire import (
    JOB_FUNCTION,
    PRIORITIES,
    JobEvent,
    events_key,
    parse_event,
    queue_name,
)
from omlx_worker import build
from omlx_worker.control.in_turn import ModelsInTurn
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.mac.machine import Mac
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import FakeEngine

if TYPE_CHECKING:
    import pytest

ALIAS = "fake"
SCRIPT = Path(__file__).with_name("run_fake_worker.py")


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """Wait until a condition holds; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what or condition}"
        time.sleep(0.01)
    return value


def queue(connection: Redis, priority: Any = "default") -> Queue:
    return Queue(queue_name(ALIAS, priority), connection=connection, serializer=JSONSerializer)


def enqueue(
    connection: Redis, prompt: str = "hello", priority: Any = "default", **options: Any
) -> Job:
    """Enqueue through stock RQ, which rings for nobody."""
    rq_options = {
        name: options.pop(name)
        for name in list(options)
        if name
        in (
            "depends_on",
            "on_success",
            "on_failure",
            "on_stopped",
            "retry",
            "repeat",
            "rate_limit",
            "webhooks",
            "job_timeout",
            "result_ttl",
            "failure_ttl",
            "job_id",
        )
    }
    request = {"model": ALIAS, "prompt": prompt, **options}
    return queue(connection, priority).enqueue(
        JOB_FUNCTION, kwargs={"request": request}, **rq_options
    )


def enqueue_raw(connection: Redis, data: bytes, job_id: str, **fields: Any) -> Job:
    """A job as somebody writes it by hand."""
    target = queue(connection)
    connection.hset(
        f"{RQ}:job:{job_id}",
        mapping={
            "data": data,
            "status": "queued",
            "origin": target.name,
            "created_at": "2026-01-01T00:00:00.000000Z",
            **fields,
        },
    )
    connection.rpush(target.key, job_id)
    return Job(job_id, connection=connection, serializer=JSONSerializer)


def fetch(connection: Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


def status(job: Job) -> str:
    return str(job.get_status().value)


def is_over(job: Job) -> bool:
    return status(job) in ("finished", "failed", "stopped", "canceled")


def events(connection: Redis, job_id: str) -> list[JobEvent]:
    return [parse_event(fields[b"event"]) for _, fields in connection.xrange(events_key(job_id))]


def streamed_text(connection: Redis, job_id: str, choice: int = 0) -> str:
    return "".join(
        delta.text
        for event in events(connection, job_id)
        if event.type == "tokens"
        for delta in event.choices
        if delta.index == choice
    )


def started(connection: Redis) -> int:
    return sum(
        StartedJobRegistry(queue_name(ALIAS, p), connection=connection).count for p in PRIORITIES
    )


def rq_info(url: str) -> str:
    result = CliRunner().invoke(rq_cli, ["info", "--url", url, "--raw"])
    assert result.exit_code == 0, result.output
    return result.output


def loads(patch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    """Let the worker of the command load a fake engine."""
    patch.setattr(build, "load_engine", load)
    patch.setattr(build, "describe", lambda _: FakeEngine().info)


@contextlib.contextmanager
def running_worker(
    url: str,
    *,
    max_rows: int = 16,
    step_seconds: float = 0.0,
    vector_size: int = 0,
    burst: bool = False,
    machine: Mac | None = None,
    **options: Any,
) -> Iterator[GenerationWorker]:
    """A worker on a thread; stopped at once when the block ends before it does."""
    engine = FakeEngine(max_rows, step_seconds, vector_size)
    connection = Redis.from_url(url)
    settings = WorkerSettings(
        **{"model": "demo", "model_alias": ALIAS, "max_batch": max_rows, **options}
    )
    worker = GenerationWorker(settings, lambda *_: engine, connection=connection, machine=machine)
    worker.test_engine = engine
    with contextlib.closing(connection), on_a_thread(worker, burst=burst):
        yield worker


@contextlib.contextmanager
def on_a_thread(worker: GenerationWorker | ModelsInTurn, *, burst: bool) -> Iterator[None]:
    """Let a worker work, and stop it at once when the block ends before it does.

    Its thread is ``test_thread``, and what it raised is in ``test_errors``.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            worker.work(burst=burst)
        except BaseException as error:  # noqa: BLE001 (callers raise it again)
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    worker.test_thread, worker.test_errors = thread, errors
    try:
        yield
    finally:
        if not burst:
            worker.stop()
            worker.stop()
        thread.join(30)
    assert not thread.is_alive()


def run_burst(url: str, **options: Any) -> FakeEngine:
    """Serve until the queues are empty."""
    with running_worker(url, burst=True, **options) as worker:
        worker.test_thread.join(30)
        assert not worker.test_thread.is_alive(), "the burst does not end"
        for error in worker.test_errors:
            raise error
        return worker.test_engine


@contextlib.contextmanager
def worker_process(
    url: str, stderr: IO[bytes] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker as a process of its own, killed when the block ends."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen([sys.executable, str(SCRIPT), url, *flags], stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
