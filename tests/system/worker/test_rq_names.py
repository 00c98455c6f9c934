"""Workers with names of their user's choice, after the death of one and beside a living one."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
from redis import Redis
from redis.client import Pipeline
from rq import Worker
from rq.utils import now, utcformat

from omlx_worker.control.rq_record import TAKEOVER_SECONDS, NameTaken, RecordedWorker
from tests.helpers.leases import QUEUES
from tests.helpers.run_deadly_worker import SCRIPT
from tests.helpers.workers import enqueue, is_over, running_worker, status, wait_for


def newcomer(connection: Redis) -> RecordedWorker:
    return RecordedWorker(QUEUES, connection=connection, name="mac-1", models=["m"])


def leave_record(connection: Redis, **fields: str) -> None:
    """The record of a worker that was killed on this machine some seconds ago."""
    worker = newcomer(connection)
    worker.register_birth()
    connection.hset(worker.key, mapping=fields)


def dead_process() -> str:
    with subprocess.Popen(["true"]) as process:
        process.wait(10)
        return str(process.pid)


def test_a_worker_that_was_killed_can_be_started_again_under_its_name(
    redis_url: str, connection: Redis
) -> None:
    command = [sys.executable, str(SCRIPT), redis_url, "mac-1"]
    for _ in range(2):
        job = enqueue(connection, max_completion_tokens=5)
        with subprocess.Popen(command) as worker:
            try:
                wait_for(lambda j=job: is_over(j))
            finally:
                worker.kill()
        assert status(job) == "finished"
    assert [worker.name for worker in Worker.all(connection)] == ["mac-1"]


def test_the_name_of_a_living_worker_is_refused_with_one_sentence(
    redis_url: str, connection: Redis
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        leave_record(connection, pid=str(other.pid))
        with pytest.raises(NameTaken) as caught:
            newcomer(connection).register_birth()
        other.kill()
    assert str(caught.value).startswith("name: got 'mac-1', the name of a worker that was alive")
    assert f"process {other.pid} on " in str(caught.value)
    assert connection.hget("rq:worker:mac-1", "pid") == str(other.pid).encode()


def test_a_worker_on_another_machine_lives_until_it_has_been_silent(connection: Redis) -> None:
    leave_record(connection, hostname="elsewhere", pid=dead_process())
    with pytest.raises(NameTaken):
        newcomer(connection).register_birth()
    silent = utcformat(now() - timedelta(seconds=TAKEOVER_SECONDS + 1))
    connection.hset("rq:worker:mac-1", "last_heartbeat", silent)
    newcomer(connection).register_birth()
    assert connection.hget("rq:worker:mac-1", "hostname") != b"elsewhere"


@pytest.mark.parametrize("pid", ["dead", "own"])
def test_the_record_of_a_process_that_is_gone_is_taken_over(connection: Redis, pid: str) -> None:
    leave_record(connection, pid=dead_process() if pid == "dead" else str(os.getpid()))
    newcomer(connection).register_birth()
    assert connection.hget("rq:worker:mac-1", "pid") == str(os.getpid()).encode()


def test_of_two_that_take_a_name_over_at_once_one_is_refused(
    connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_record(connection, pid=dead_process())
    late = newcomer(connection)
    read, living = Pipeline.hmget, subprocess.Popen(["sleep", "60"])

    def read_then_be_overtaken(pipeline: Pipeline, *names: str) -> list[bytes | None]:
        values = read(pipeline, *names)
        monkeypatch.setattr(Pipeline, "hmget", read)
        early = newcomer(connection)
        early.register_birth()
        connection.hset(early.key, "pid", str(living.pid))
        return values

    monkeypatch.setattr(Pipeline, "hmget", read_then_be_overtaken)
    with living:
        with pytest.raises(NameTaken):
            late.register_birth()
        living.kill()


def test_a_worker_that_ended_in_order_leaves_its_name_at_once(
    redis_url: str, connection: Redis
) -> None:
    for _ in range(2):
        with running_worker(redis_url, name="mac-1"):
            job = enqueue(connection)
            wait_for(lambda j=job: is_over(j))
