"""Completion windows are kept by the server's clock, also of models that nobody serves."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import rq.job
from redis import Redis
from rq.utils import now

from omlx_producer import JobFailed, Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.wire import queue_name
from omlx_producer.wire.keys import EXPIRING_KEY, open_key
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.bulk_rows import QUEUE, batch_of, rows
from tests.helpers.leases import claim, commit, done, table
from tests.helpers.server_time import forward
from tests.helpers.workers import ALIAS, fetch, run_burst, running_worker, status, wait_for

pytestmark = pytest.mark.usefixtures("server_time")

EXPIRED = "the job did not finish within its completion_window"


def expire_due(connection: Redis) -> int:
    """A worker of another model fails what is due; returns how many jobs."""
    leases = LeaseTable(connection, "elsewhere", [queue_name("another", "default")])
    return sum(Upkeep(leases).expire())


def submit(producer: Producer, window: str, **fields: Any) -> str:
    arguments = {"model": ALIAS, "prompt": "x", "require_known_model": False}
    return producer.submit(completion_window=window, **arguments, **fields).id


def test_a_job_that_nobody_serves_expires(connection: Redis) -> None:
    with Producer(connection) as producer:
        late, early = submit(producer, "1h"), submit(producer, "24h")
        assert expire_due(connection) == 0
        forward(connection, 3601)
        assert expire_due(connection) == 1
        with pytest.raises(JobFailed, match=EXPIRED) as failure:
            producer.result(late, timeout=5)
        assert failure.value.code == "expired"
        assert [event.type for event in producer.stream(late)] == ["failed"]
        assert status(fetch(connection, early)) == "queued"
    [left] = claim(table(connection), 5)
    assert left.id == early


def test_the_window_begins_by_the_clock_of_the_server(
    connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq.job, "now", lambda: now() - timedelta(days=2))
    with Producer(connection) as producer:
        job_id = submit(producer, "24h")
        monkeypatch.undo()
        assert expire_due(connection) == 0
        assert status(fetch(connection, job_id)) == "queued"
        with running_worker(connection_url(connection)):
            assert producer.result(job_id, timeout=20)


def connection_url(connection: Redis) -> str:
    options = connection.get_connection_kwargs()
    return f"redis://{options['host']}:{options['port']}/{options['db']}"


def test_a_job_that_runs_keeps_its_worker(connection: Redis) -> None:
    with Producer(connection) as producer:
        job_id = submit(producer, "20s")
    leases = table(connection)
    [job] = claim(leases)
    forward(connection, 21)
    assert expire_due(connection) == 0
    commit(leases, job, done(job.id))
    assert status(fetch(connection, job_id)) == "finished"


def test_a_job_that_ran_past_its_window_is_looked_at_again_once_it_waits(
    connection: Redis,
) -> None:
    with Producer(connection) as producer:
        submit(producer, "20s")
    leases = table(connection)
    claimed = claim(leases)
    forward(connection, 21)
    assert expire_due(connection) == 0
    leases.give_back(claimed)
    forward(connection, 11)
    assert expire_due(connection) == 1


def test_a_running_job_expires_when_its_lease_passes(connection: Redis) -> None:
    with Producer(connection) as producer:
        submit(producer, "20s")
    claim(table(connection))
    forward(connection, 31)
    assert expire_due(connection) == 1


def test_a_leader_that_dies_before_it_fails_a_job_has_a_successor(
    connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(endings: Any) -> None:
        raise SystemExit

    with Producer(connection) as producer:
        job_id = submit(producer, "1h")
        forward(connection, 3601)
        leader = table(connection)
        monkeypatch.setattr(leader, "commit", die)
        with pytest.raises(SystemExit):
            list(Upkeep(leader).expire())
        assert expire_due(connection) == 0
        forward(connection, 31)
        assert expire_due(connection) == 1
        with pytest.raises(JobFailed, match=EXPIRED):
            producer.result(job_id, timeout=5)


def test_an_expired_job_that_is_requeued_runs(connection: Redis) -> None:
    with Producer(connection) as producer:
        job_id = submit(producer, "1h")
    forward(connection, 3601)
    assert expire_due(connection) == 1
    fetch(connection, job_id).requeue()
    forward(connection, 31)
    assert expire_due(connection) == 0
    [job] = claim(table(connection))
    assert job.id == job_id


def test_each_row_of_a_batch_has_its_own_window(redis_url: str, connection: Redis) -> None:
    batch, windows = Batch.create(connection), (None, "24h", "1h", None)
    batch.upload(
        row
        for number, window in enumerate(windows)
        for row in rows(20, 20 * number, completion_window=window)
    )
    forward(connection, 3601)
    expire_due(connection)
    run_burst(redis_url)
    state = batch.read()
    assert (state.ok, state.failures, state.left) == (60, {"expired": 20}, 0)


def test_a_batch_with_rows_that_came_too_late_has_expired(
    redis_url: str, connection: Redis
) -> None:
    batch = Batch.create(connection)
    batch.upload([*rows(2, completion_window="1h"), *rows(3, 2)])
    forward(connection, 3601)
    run_burst(redis_url)
    state = batch.read()
    assert (state.state, state.ok, state.failures) == ("expired", 3, {"expired": 2})
    errors = [json.loads(line)["error"] for line in batch.results(state)]
    assert [error["code"] for error in errors if error] == ["expired"] * 2


def test_rows_that_nobody_serves_expire(connection: Redis) -> None:
    batch = batch_of(connection, 150, completion_window="1h")
    assert expire_due(connection) == 0
    forward(connection, 3601)
    assert expire_due(connection) == 150
    state = batch.read()
    assert (state.state, state.left, state.failures) == ("expired", 0, {"expired": 150})
    ended = [json.loads(line) for line in batch.results(state)]
    assert [line["custom_id"] for line in ended] == [row.custom_id for row in rows(150)]
    assert ended[0]["error"]["message"].startswith(EXPIRED)
    forward(connection, 11)
    assert expire_due(connection) == 0
    assert not connection.exists(EXPIRING_KEY, open_key(QUEUE)), "nothing stays for ever"


@pytest.mark.parametrize("window", ["24h", None])
def test_rows_wait_for_the_longest_window_of_their_batch(
    redis_url: str, connection: Redis, window: str | None
) -> None:
    batch = Batch.create(connection)
    batch.upload([*rows(2, completion_window="0.000001s"), *rows(1, 2, completion_window=window)])
    forward(connection, 3601)
    assert expire_due(connection) == 0
    run_burst(redis_url)
    assert (batch.read().ok, batch.read().failures) == (1, {"expired": 2})


def test_a_row_expires_when_the_lease_of_its_dead_worker_passes(connection: Redis) -> None:
    batch = batch_of(connection, 2, completion_window="20s")
    [job] = claim(table(connection))
    forward(connection, 21)
    assert expire_due(connection) == 1
    assert (expire_due(connection), batch.read().left) == (0, 1)
    forward(connection, 11)
    assert expire_due(connection) == 1
    state = batch.read()
    assert (state.state, state.failures) == ("expired", {"expired": 2})
    assert connection.exists(f"rq:job:{job.id}") == 0


def test_a_worker_of_any_model_expires_jobs_as_it_sweeps(redis_url: str, connection: Redis) -> None:
    with Producer(connection) as producer:
        job_id = producer.submit(
            model="nobody", prompt="x", completion_window="1h", require_known_model=False
        ).id
        forward(connection, 3601)
        with running_worker(redis_url):
            wait_for(lambda: status(fetch(connection, job_id)) == "failed")
