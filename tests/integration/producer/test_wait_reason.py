"""Waiting for a job that shows nothing: one line on stderr says why."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis
from click.testing import CliRunner, Result

from omlx_producer import JobHandle, Producer
from omlx_producer.cli import show
from omlx_producer.cli.main import cli
from omlx_producer.cli.show import wait_reason
from tests.helpers.bulk_runs import upload
from tests.helpers.fake_worker import FakeWorker, announce, sign_on
from tests.helpers.redis_server import RedisServer
from tests.helpers.waiting import later

Run = Callable[..., Result]
Reasons = Callable[..., list[str]]
UNSERVED = "omlx-submit: no worker serves demo"
LOOKS = 3
"""At a job, before anything changes."""


class Looks:
    """Does one thing after another, each once the command has looked at the job a few times."""

    def __init__(self) -> None:
        self.then: list[Callable[[], object]] = []
        self._count = 0

    def __call__(self, connection: redis.Redis, job_id: str) -> str | None:
        reason = wait_reason(connection, job_id)
        self._count += 1
        if self.then and self._count % LOOKS == 0:
            self.then.pop(0)()
        return reason


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(show, "wait_reason", looks)
    return looks


@pytest.fixture
def run(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    monkeypatch.setattr(show, "SILENT_SECONDS", 0.05)
    return lambda *args: CliRunner().invoke(cli, args, prog_name="omlx-submit")


@pytest.fixture
def reasons(run: Run, looks: Looks) -> Reasons:
    """What is said of a job until it is cancelled, which is after what happens to others."""

    def say(job: JobHandle, *happens: Callable[[], object]) -> list[str]:
        looks.then = [*happens, job.cancel]
        *said, last = run("result", job.id).stderr.splitlines()
        assert "cancelled" in last
        return said

    return say


def test_a_model_that_nobody_serves_is_told_once(reasons: Reasons, job: JobHandle) -> None:
    assert reasons(job) == [UNSERVED]


def test_the_stream_of_a_job_that_nobody_serves_tells_it_too(
    run: Run, looks: Looks, job: JobHandle, connection: redis.Redis
) -> None:
    def serve() -> None:
        worker = FakeWorker(connection, job.id)
        worker.start()
        worker.step("text")
        worker.finish()

    looks.then = [serve]
    done = run("watch", job.id)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "text\n", UNSERVED + "\n")


def test_the_jobs_ahead_in_all_better_queues_are_counted(
    reasons: Reasons, producer: Producer, connection: redis.Redis
) -> None:
    sign_on(connection, "mac-1")
    for priority in ("high", "default", "bulk"):
        producer.submit(prompt="x", priority=priority)
    job = producer.submit(prompt="x")
    assert reasons(job) == ["omlx-submit: waiting behind 2 jobs"]


def test_another_line_comes_with_another_reason_and_not_with_another_figure(
    reasons: Reasons, producer: Producer, connection: redis.Redis
) -> None:
    first, second, last = (producer.submit(prompt="x") for _ in range(3))
    sign_on(connection, "mac-1")
    assert reasons(
        last, FakeWorker(connection, first.id).start, FakeWorker(connection, second.id).start
    ) == [
        "omlx-submit: waiting behind 2 jobs",
        "omlx-submit: the job is the next that a worker of demo takes",
    ]


def test_workers_that_take_no_jobs_are_told_with_all_reasons(
    reasons: Reasons, job: JobHandle, connection: redis.Redis
) -> None:
    sign_on(connection, "mac-1", state="paused")
    sign_on(connection, "mac-2", state="draining")
    said = "the workers of demo are draining, paused (rq resume)"
    assert reasons(job) == [f"omlx-submit: {said}"]


def test_paused_workers_are_told(reasons: Reasons, job: JobHandle, connection: redis.Redis) -> None:
    sign_on(connection, "mac-1", state="paused")
    said = "omlx-submit: the workers of demo are paused (rq resume)"
    assert reasons(job) == [said]


def test_a_paused_model_is_told(reasons: Reasons, job: JobHandle, connection: redis.Redis) -> None:
    sign_on(connection, "mac-1", state="paused")
    connection.sadd("omlx:paused", "demo")
    said = "omlx-submit: demo is paused; omlx-submit resume demo lets it go on"
    assert reasons(job) == [said]


def test_rows_of_batches_in_better_queues_are_counted(
    reasons: Reasons, job: JobHandle, connection: redis.Redis
) -> None:
    sign_on(connection, "mac-1")
    upload(connection, 40, priority="high")
    upload(connection, 9)
    assert reasons(job) == ["omlx-submit: waiting behind 40 jobs"]


def test_a_job_that_rq_holds_back_is_told(
    reasons: Reasons, job: JobHandle, connection: redis.Redis
) -> None:
    connection.hset(f"rq:job:{job.id}", "status", "deferred")
    assert reasons(job) == ["omlx-submit: RQ holds the job back: it is deferred"]


def test_a_job_whose_worker_has_died_is_told(
    run: Run, looks: Looks, job: JobHandle, worker: FakeWorker
) -> None:
    looks.then = [worker.finish]
    assert run("result", job.id).stderr == UNSERVED + "\n"


def test_nothing_is_said_of_a_job_that_runs(
    run: Run, looks: Looks, job: JobHandle, worker: FakeWorker, connection: redis.Redis
) -> None:
    sign_on(connection, "mac-1")
    looks.then = [worker.finish]
    assert run("result", job.id).stderr == ""


def test_nothing_is_said_while_tokens_come(
    run: Run, job: JobHandle, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "SILENT_SECONDS", 1.0)

    def write() -> None:
        for _ in range(30):
            worker.step("x")
            time.sleep(0.05)
        worker.finish()

    thread = later(write, 0)
    done = run("watch", job.id)
    thread.join()
    assert (done.stdout, done.stderr) == ("x" * 30 + "\n", "")


@pytest.mark.slow
def test_a_redis_that_goes_away_is_told(run: Run, private_server: RedisServer) -> None:
    with redis.Redis.from_url(private_server.url) as connection:
        announce(connection)
        sign_on(connection, "mac-1")
        job = Producer(connection).submit(prompt="x")
    thread = later(private_server.kill, 0.3)
    done = run("result", job.id, "--timeout", "2", "--redis-url", private_server.url)
    thread.join()
    assert done.stderr.splitlines()[:2] == [
        "omlx-submit: the job is the next that a worker of demo takes",
        "omlx-submit: Redis is away; trying again for up to 60 s",
    ]


def test_on_a_terminal_the_line_does_not_continue_the_text(
    job: JobHandle,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(show, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with show.WaitReasons(connection, job.id) as reasons:
        reasons.heard()
        time.sleep(0.3)
    assert capsys.readouterr().err.startswith("\n")
