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
from omlx_producer.bulk.batch import BATCHES_KEY, Batch, open_key
from omlx_producer.wire import EXPIRING_KEY, queue_name
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.leases import claim, commit, done, table
from tests.helpers.workers import ALIAS, fetch, running_worker, status, wait_for
from tests.integration.producer.bulk.test_collector import rows

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
        late, early = submit(producer, "0s"), submit(producer, "24h")
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
        job_id = submit(producer, "0s")
    leases = table(connection)
    [job] = claim(leases)
    assert expire_due(connection) == 0
    commit(leases, job, done(job.id))
    assert status(fetch(connection, job_id)) == "finished"


def test_rows_that_nobody_serves_expire_and_end_their_batch(connection: Redis) -> None:
    batch = Batch.create(connection)
    batch.upload(rows(250, completion_window="0s"))
    expire_due(connection)
    state = batch.read()
    assert (state.state, state.failures, state.left) == ("expired", {"expired": 250}, 0)
    assert state.over
    errors = [json.loads(line) for line in batch.results(batch.read())]
    assert [error["custom_id"] for error in errors] == [f"r{n}" for n in range(250)]
    assert all(EXPIRED in error["error"]["message"] for error in errors)
    assert connection.zcard(BATCHES_KEY) == 0
    assert connection.zcard(EXPIRING_KEY) == 0


def test_rows_that_ran_in_time_stay_and_the_batch_has_expired(connection: Redis) -> None:
    batch = Batch.create(connection)
    batch.upload(rows(3, completion_window="0s"))
    leases = table(connection)
    [row] = claim(leases)
    expire_due(connection)
    assert (batch.read().state, batch.read().left) == ("open", 1)
    commit(leases, row, done(row.id))
    state = batch.read()
    # The row has ended with what is no response body.
    assert (state.state, state.failures) == ("expired", {"expired": 2, "no_response": 1})


@pytest.mark.parametrize("window", ["24h", None])
def test_rows_with_time_left_wait(connection: Redis, window: str | None) -> None:
    batch = Batch.create(connection)
    batch.upload(rows(3, completion_window=window))
    expire_due(connection)
    assert batch.read().left == 3
    assert connection.zcard(open_key(queue_name(ALIAS, "bulk"))) == 1


def test_a_worker_of_any_model_expires_jobs_as_it_sweeps(redis_url: str, connection: Redis) -> None:
    with Producer(connection) as producer:
        job_id = producer.submit(
            model="nobody", prompt="x", completion_window="1s", require_known_model=False
        ).id
        with running_worker(redis_url, lease_seconds=1.0):
            wait_for(lambda: status(fetch(connection, job_id)) == "failed")
