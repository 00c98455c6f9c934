"""Detached batches: workers take their rows, and nothing else is needed."""

from __future__ import annotations

import json
import zlib
from collections import Counter

import pytest
import redis
from redis.exceptions import ResponseError
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.wire import GenerationRequest, queue_name
from omlx_producer.wire.keys import BATCHES_KEY, open_key
from tests.helpers.bulk_rows import batch_of, rows
from tests.helpers.bulk_runs import jobs_in_redis
from tests.helpers.leases import claim, commit, done, failed, kill, table
from tests.helpers.server_time import forward
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    run_burst,
    running_worker,
    status,
    wait_for,
    worker_process,
)
from tests.integration.producer.bulk.conftest import Run

QUEUE = queue_name(ALIAS, "bulk")


def custom_ids(batch: Batch) -> list[str]:
    return [json.loads(line)["custom_id"] for line in batch.results(batch.read())]


def test_workers_alone_bring_a_batch_to_its_end(redis_url: str, connection: redis.Redis) -> None:
    batch = batch_of(connection, 150)
    state = batch.read()
    assert (state.state, state.rows, state.ok, state.left) == ("open", 150, 0, 150)
    assert jobs_in_redis(connection) == 0, "a row that waits is no job"
    run_burst(redis_url, max_rows=8)
    state = batch.read()
    assert (state.state, state.ok, state.failed, state.left) == ("done", 150, 0, 0)
    assert state.usage.completion_tokens > 300
    # In the order of the input, whatever the order of the ends was.
    assert custom_ids(batch) == [f"r{n}" for n in range(150)]
    assert jobs_in_redis(connection) == 0
    assert 0 < connection.ttl(batch.key) <= 7 * 24 * 3600
    assert 0 < connection.ttl(batch.results_key) <= 7 * 24 * 3600
    assert connection.keys("omlx:batches*") == [b"omlx:batches:ended"]
    left = {batch.key.encode(), batch.results_key.encode()}
    assert set(connection.keys("omlx:batch:*")) == left


def test_a_row_is_a_job_while_it_runs(redis_url: str, connection: redis.Redis) -> None:
    batch = batch_of(connection, 3, max_completion_tokens=9000)
    with running_worker(redis_url, max_rows=2, step_seconds=0.01):
        wait_for(lambda: jobs_in_redis(connection) == 2)
        assert connection.llen(batch.waiting_key(QUEUE)) == 1
        job = Job.fetch(f"row-{batch.run}-1", connection=connection, serializer=JSONSerializer)
        assert status(job) == "started"
        assert job.origin == QUEUE
        assert job.kwargs["request"]["prompt"].startswith("prompt ")


def test_rows_that_can_never_run_have_their_error_at_once(connection: redis.Redis) -> None:
    batch = Batch.create(connection)
    bad = BadRow(2, None, "unparsable", "line 2: not JSON", "0" * 24, False)
    batch.upload([*rows(1), bad])
    assert batch.read().failures == {"unparsable": 1}
    assert custom_ids(batch) == [None]


def test_a_batch_without_rows_to_run_is_done_at_once(connection: redis.Redis) -> None:
    batch = Batch.create(connection)
    batch.upload([BadRow(1, None, "unparsable", "line 1: not JSON", "0" * 24, False)])
    state = batch.read()
    assert (state.state, state.rows, state.failed) == ("done", 1, 1)
    assert connection.ttl(batch.results_key) > 0
    assert connection.zcard(BATCHES_KEY) == 0


def test_an_upload_that_is_cut_off_never_runs_and_expires(
    redis_url: str, connection: redis.Redis
) -> None:
    batch = Batch.create(connection)

    def breaking():
        yield from rows(1300)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.upload(breaking())
    assert run_burst(redis_url).most_rows == 0
    assert 0 < connection.ttl(batch.key) <= 3600
    assert 0 < connection.ttl(batch.waiting_key(QUEUE)) <= 3600


def test_a_failed_row_has_its_code_and_sentence_and_the_others_run(
    redis_url: str, connection: redis.Redis
) -> None:
    batch = Batch.create(connection)
    batch.upload([*rows(1), *rows(1, start=1, max_completion_tokens=20_000), *rows(1, start=2)])
    run_burst(redis_url)
    state = batch.read()
    assert (state.state, state.ok, state.failures) == ("done", 2, {"invalid_request": 1})
    [line] = [
        json.loads(line) for line in batch.results(batch.read()) if b'"response": null' in line
    ]
    assert line["custom_id"] == "r1"
    assert "tokens; at most" in line["error"]["message"]


def test_a_commit_that_is_repeated_counts_its_row_once(connection: redis.Redis) -> None:
    batch, leases = batch_of(connection, 2), table(connection)
    (claimed,) = claim(leases)
    for _ in range(2):
        commit(leases, claimed, done(claimed.id))
    state = batch.read()
    assert (state.ok + state.failed, state.left, state.state) == (1, 1, "open")
    assert len(list(batch.results(batch.read()))) == 1


@pytest.mark.usefixtures("server_time")
def test_a_row_of_a_dead_worker_goes_on_and_ends_once(
    redis_url: str, connection: redis.Redis
) -> None:
    batch, leases = batch_of(connection, 1), table(connection)
    (old,) = claim(leases)
    kill(connection)
    run_burst(redis_url)
    assert commit(leases, old, failed(old.id)).name == "DONE", "it has its result"
    state = batch.read()
    assert (state.state, state.ok, state.failed) == ("done", 1, 0)


def test_a_row_whose_job_somebody_deletes_runs_again(
    redis_url: str, connection: redis.Redis
) -> None:
    batch, leases = batch_of(connection, 2), table(connection)
    (claimed,) = claim(leases)
    Job.fetch(claimed.id, connection=connection, serializer=JSONSerializer).delete()
    with running_worker(redis_url, lease_seconds=1):
        wait_for(lambda: batch.read().over)
    state = batch.read()
    assert (state.state, state.ok) == ("done", 2)


def test_a_row_whose_job_is_cancelled_by_hand_fails_and_the_batch_ends(
    redis_url: str, connection: redis.Redis
) -> None:
    batch, leases = batch_of(connection, 2), table(connection)
    (claimed,) = claim(leases)
    leases.give_back([claimed])
    assert Producer(connection).cancel(claimed.id) == "cancelled"
    with running_worker(redis_url, lease_seconds=1):
        wait_for(lambda: batch.read().over)
    state = batch.read()
    assert (state.ok, state.failures) == (1, {"cancelled": 1})
    [line] = [
        json.loads(line) for line in batch.results(batch.read()) if b'"response": null' in line
    ]
    assert line["error"]["code"] == "cancelled"
    assert line["custom_id"] == claimed.row.custom_id


def test_single_jobs_go_before_batches_and_batches_share_the_worker(
    connection: redis.Redis,
) -> None:
    first, second = (batch_of(connection, 40) for _ in range(2))
    enqueue(connection, priority="bulk", job_id="single")
    leases, served = table(connection), Counter[str]()
    assert [job.id for job in claim(leases)] == ["single"]
    for _ in range(20):
        for job in claim(leases, 2):
            served[job.row.run] += 1
    assert served == {first.run: 20, second.run: 20}


@pytest.mark.usefixtures("server_time")
def test_batches_share_the_worker_though_the_clock_goes_back(connection: redis.Redis) -> None:
    first, second = (batch_of(connection, 20) for _ in range(2))
    leases, served = table(connection), Counter[str]()
    claim(leases)
    forward(connection, -3600)
    for _ in range(9):
        batch_of(connection, 1)
        for _ in range(2):
            [job] = claim(leases)
            served[job.row.run] += 1
    assert served[first.run] >= 3
    assert served[second.run] >= 3


def test_consecutive_rows_of_a_batch_come_in_one_claim(connection: redis.Redis) -> None:
    batches = [batch_of(connection, 8) for _ in range(2)]
    for _ in batches:
        claimed = claim(table(connection), 4)
        assert len({job.row.run for job in claimed}) == 1
        assert len(claimed) == 4


def test_rows_of_a_model_that_nobody_serves_keep_no_others_waiting(
    redis_url: str, connection: redis.Redis
) -> None:
    batch = Batch.create(connection)
    served = rows(5)
    asleep = [
        Row(f"x{n}", n, GenerationRequest(model="asleep", prompt="x"), f"{n:024x}")
        for n in range(2000)
    ]
    batch.upload([*asleep, *served])
    run_burst(redis_url)
    state = batch.read()
    assert (state.state, state.ok, state.left) == ("open", 5, 2000)
    assert state.models == ["asleep", ALIAS]
    other = batch_of(connection, 3)
    run_burst(redis_url)
    assert other.read().state == "done"


@pytest.mark.parametrize(
    "entry",
    [b"", b"nonsense", b"1 2 3", b'1 00 now "r0"\n' + zlib.compress(b"no request")],
    ids=["empty", "word", "no-line", "no-request"],
)
def test_a_row_that_is_no_row_does_not_stop_the_others(
    redis_url: str, connection: redis.Redis, entry: bytes
) -> None:
    batch = batch_of(connection, 2)
    connection.lset(batch.waiting_key(QUEUE), 0, entry)
    run_burst(redis_url)
    state = batch.read()
    assert (state.state, state.ok, state.failed) == ("done", 1, 1)


def test_new_batches_do_not_keep_an_older_one_waiting(connection: redis.Redis) -> None:
    old, leases = batch_of(connection, 20), table(connection)
    served = 0
    for _ in range(20):
        batch_of(connection, 1)
        (claimed,) = claim(leases)
        served += claimed.id.startswith(f"row-{old.run}-")
    assert served >= 5, "it takes turns with all that wait"


@pytest.mark.usefixtures("server_time")
@pytest.mark.parametrize("broken", ["hash", "results", "waiting", "running", "open"])
def test_rows_whose_worker_ends_at_a_key_of_another_type_end_once_it_is_gone(
    redis_url: str, connection: redis.Redis, broken: str
) -> None:
    batch = batch_of(connection, 2)
    key = {
        "hash": batch.key,
        "results": batch.results_key,
        "waiting": batch.waiting_key(QUEUE),
        "running": batch.running_key(QUEUE),
        "open": open_key(QUEUE),
    }[broken]
    if connection.exists(key):
        connection.rename(key, "spare")
    connection.set(key, "of another type")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        run_burst(redis_url)
    connection.delete(key)
    if connection.exists("spare"):
        connection.rename("spare", key)
    forward(connection, 31)
    with running_worker(redis_url):
        wait_for(lambda: batch.read().over)
    assert sorted(custom_ids(batch)) == ["r0", "r1"]


@pytest.mark.slow
def test_workers_killed_at_any_moment_lose_and_double_nothing(
    redis_url: str, connection: redis.Redis
) -> None:
    batch = batch_of(connection, 300, max_completion_tokens=20)
    for share in (20, 60, 100, 150):
        with worker_process(redis_url, max_rows=8, step_seconds=0.005):
            wait_for(lambda share=share: batch.read().ok > share, 30)
    with worker_process(redis_url, max_rows=8):
        wait_for(lambda: batch.read().over, 60)
    state = batch.read()
    assert (state.state, state.ok) == ("done", 300)
    assert Counter(custom_ids(batch)) == Counter(f"r{n}" for n in range(300))
    assert jobs_in_redis(connection) == 0


def test_cancelling_drops_what_waits_stops_what_runs_and_keeps_results(
    redis_url: str, connection: redis.Redis, run: Run
) -> None:
    batch = Batch.create(connection)
    batch.upload([*rows(2), *rows(98, start=2, max_completion_tokens=9_000)])
    with running_worker(redis_url, max_rows=4, step_seconds=0.01):
        wait_for(lambda: batch.read().ok == 2 and jobs_in_redis(connection) == 4)
        assert run("cancel", batch.id).output == "cancelled\n"
    state = batch.read()
    assert (state.state, state.ok, state.failures) == ("cancelled", 2, {"cancelled": 4})
    assert jobs_in_redis(connection) == 0
    assert run("cancel", batch.id).output == "cancelled\n"
    assert state.failed == 0, "nobody's fault"
    for command in ("watch", "results"):
        told = run(command, batch.id)
        assert told.exit_code == 1
        assert (
            f"{batch.id}: cancelled, 2 of 100 rows ended; 98 rows have no result\n" in told.stderr
        )


def test_cancelling_what_waits_needs_no_worker(connection: redis.Redis, run: Run) -> None:
    batch = batch_of(connection, 100)
    assert run("cancel", batch.id).output == "cancelled\n"
    assert connection.keys("omlx:batches*") == [b"omlx:batches:ended"]


@pytest.mark.usefixtures("server_time")
def test_rows_of_a_dead_worker_end_a_cancelled_batch_when_another_sweeps(
    redis_url: str, connection: redis.Redis
) -> None:
    batch, dead = batch_of(connection, 3), table(connection, "dead")
    claim(dead)
    assert batch.cancel()
    assert batch.read().state == "cancelling"
    forward(connection, 31)
    with running_worker(redis_url):
        wait_for(lambda: batch.read().over)
    state = batch.read()
    assert (state.state, state.failures) == ("cancelled", {"cancelled": 1})
