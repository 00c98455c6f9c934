"""A producer of a later version, whose requests have one more field, beside workers of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
import redis
from click.testing import CliRunner
from pydantic import Field

from omlx_producer import Producer
from omlx_producer.bulk import progress
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.progress import WorkerWatch
from omlx_producer.bulk.row import Row
from omlx_producer.cli.main import cli
from omlx_producer.wire import WIRE_VERSION, GenerationRequest
from omlx_producer.wire.request_part import RequestPart, Since
from tests.helpers.workers import ALIAS, fetch, is_over, running_worker, status, wait_for

JOBS = 200
LATER = WIRE_VERSION + 1
WAITS = f"waits for a newer worker: no worker of {ALIAS} knows all fields of its requests; upgrade"


class LaterRequest(GenerationRequest):
    top_a: Annotated[float | None, Since(LATER)] = None


def later(**fields: object) -> LaterRequest:
    return LaterRequest.parse(
        {"model": ALIAS, "prompt": "hi", "max_completion_tokens": 2, **fields}
    )


@pytest.fixture
def worker(redis_url: str, connection: redis.Redis) -> Iterator[None]:
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:models", f"omlx:workers:{ALIAS}") == 2)
        yield


def upload(connection: redis.Redis, *requests: GenerationRequest) -> Batch:
    batch = Batch.create(connection)
    batch.upload(Row(str(n), n, each, f"{n:024}") for n, each in enumerate(requests, 1))
    return batch


def told(redis_url: str, *job: str) -> str:
    arguments = ["status", *job, "--redis-url", redis_url]
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"}).stdout


@pytest.mark.usefixtures("worker")
def test_jobs_without_the_new_field_are_served_and_the_others_are_told_to_wait(
    redis_url: str, connection: redis.Redis
) -> None:
    fields = [{"top_a": 0.5} if number % 2 else {} for number in range(JOBS)]
    with Producer(connection) as producer:
        handles = producer.submit_many(later(**each) for each in fields)
    jobs = [fetch(connection, handle.id) for handle in handles]
    wait_for(lambda: all(map(is_over, jobs[::2])))
    assert {status(job) for job in jobs[::2]} == {"finished"}
    assert {status(job) for job in jobs[1::2]} == {"queued"}
    assert f"the job {WAITS} one\n" in told(redis_url, jobs[1].id)
    assert f"omlx:{ALIAS}:default {WAITS} one\n" in told(redis_url)


@pytest.mark.usefixtures("worker")
def test_a_batch_has_the_version_of_its_latest_row(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newer, older = upload(connection, later(), later(top_a=0.5)), upload(connection, later())
    wait_for(lambda: older.read().over)
    assert newer.read().left == 2
    assert f"omlx:{ALIAS}:bulk {WAITS} one\n" in told(redis_url)
    monkeypatch.setattr(progress, "FIGURES_SECONDS", 0.0)
    # As of a run, whose batches begin like this.
    watch = WorkerWatch(connection, newer.run[:8])
    for _ in range(2):
        watch.look({ALIAS}, Meter(), in_flight=2)
    assert f"the file {WAITS} one; rows wait, and Ctrl-C loses none\n" == capsys.readouterr().err


def test_the_status_of_a_newer_worker_says_nothing(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.client.workers.WIRE_VERSION", LATER)
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:models", f"omlx:workers:{ALIAS}") == 2)
        with Producer(connection) as producer:
            job = producer.submit(later(top_a=0.5))
        assert "newer worker" not in told(redis_url, job.id) + told(redis_url)


class Inner(RequestPart):
    old: int = 0
    new: Annotated[int, Since(3)] = 0


class Outer(RequestPart):
    many: list[Inner] = Field(default_factory=list)
    one: Annotated[Inner | None, Since(2)] = None
    plain: int = 0


@pytest.mark.parametrize(
    ("part", "version"),
    [
        ({"plain": 5}, 1),
        ({"one": None}, 1),
        ({"one": {}}, 2),
        ({"one": {"new": 1}}, 3),
        ({"many": [{"old": 1}, {"new": 0}]}, 1),
        ({"many": [{"old": 1}, {"new": 1}], "one": {}}, 3),
    ],
)
def test_a_version_is_that_of_the_latest_field_that_is_not_at_its_default(
    part: dict[str, object], version: int
) -> None:
    assert Outer.parse(part).wire_version == version
