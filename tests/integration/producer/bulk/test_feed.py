"""The loop against a real server and real workers: windows, adoption, losses, interrupts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from rq import Queue
from rq.serializers import JSONSerializer

from omlx_producer import Producer
from omlx_producer.bulk import feed as feed_module
from omlx_producer.bulk.feed import Feed
from omlx_producer.bulk.jobs import job_id_of
from omlx_producer.bulk.row import BadRow, Row, RowResult, digest_of
from omlx_producer.bulk.window import InFlight
from omlx_producer.outcome import results_key
from omlx_producer.protocol import GenerationRequest, ended_stream
from tests.helpers.bulk_runs import jobs_in_redis
from tests.helpers.leases import claim, table
from tests.helpers.workers import ALIAS, running_worker, wait_for

RUN = "0123456789ab"
QUEUE = f"omlx:{ALIAS}:bulk"


def rows(count: int, start: int = 0, **fields: Any) -> list[Row]:
    made = []
    for number in range(start, start + count):
        options = {"max_completion_tokens": 4, **fields}
        request = GenerationRequest(model=ALIAS, prompt=f"prompt {number}", **options)
        digest = digest_of(f"r{number}", request.to_wire())
        made.append(Row(f"r{number}", number + 1, request, digest))
    return made


@dataclass
class Kept:
    """A sink in memory."""

    results: list[RowResult] = field(default_factory=list)

    def commit(self, results: Sequence[RowResult]) -> None:
        self.results += results

    @property
    def names(self) -> list[str]:
        return sorted(str(result.row.custom_id) for result in self.results)


def finish(feed: Feed, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while feed.busy:
        feed.turn(0.05)
        assert time.monotonic() < deadline, "the feed does not end"


def names(expected: Sequence[Row]) -> list[str]:
    return sorted(row.custom_id for row in expected)


def test_all_rows_come_back_and_nothing_stays(redis_url: str, connection: redis.Redis) -> None:
    wanted, sink = rows(300), Kept()
    feed = Feed(connection, RUN, wanted, sink, window=64)
    with running_worker(redis_url):
        finish(feed)
        feed.sweep()
    assert sink.names == names(wanted)
    assert all(result.ok for result in sink.results)
    assert jobs_in_redis(connection) == 0
    leftovers = [*connection.scan_iter("rq:results:*"), *connection.scan_iter("omlx:events:*")]
    leftovers += [*connection.scan_iter("rq:finished:*"), *connection.scan_iter("omlx:bulk:*")]
    assert leftovers == []


def test_no_more_than_the_window_is_in_redis(redis_url: str, connection: redis.Redis) -> None:
    feed = Feed(connection, RUN, rows(200), Kept(), window=30)
    most = 0
    with running_worker(redis_url, max_rows=8):
        while feed.busy:
            feed.turn(0.01)
            most = max(most, jobs_in_redis(connection))
    assert most == 30


def test_rows_of_long_prompts_wait_for_room(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.window.WINDOW_CHARACTERS", 30)
    feed = Feed(connection, RUN, rows(20), Kept(), window=100)
    for _ in range(3):
        feed.turn(0.01)
    # Eight characters each: the fourth goes over the limit, and lets no other in.
    assert feed.in_flight == 4


def test_rows_publish_no_tokens(redis_url: str, connection: redis.Redis) -> None:
    asked = rows(5)
    listener: Any = connection.pubsub()
    listener.psubscribe("omlx:tokens:*")
    feed = Feed(connection, RUN, asked, Kept())
    with running_worker(redis_url):
        finish(feed)
    messages = iter(lambda: listener.get_message(timeout=0.2), None)
    heard = [message["data"] for message in messages if message["type"] == "pmessage"]
    listener.close()
    assert len(heard) == 5
    assert all(b'"type":"done"' in data for data in heard)


def test_what_a_killed_client_has_left_is_picked_up_and_not_run_again(
    redis_url: str, connection: redis.Redis
) -> None:
    wanted, sink = rows(40), Kept()
    abandoned = Feed(connection, RUN, rows(25), Kept(), window=25)
    abandoned.turn(0.01)
    with running_worker(redis_url, burst=True) as worker:
        worker.test_thread.join(20)
        wait_for(lambda: connection.xlen(str(ended_stream(job_id_of(RUN, wanted[0])))) == 25)
    assert jobs_in_redis(connection) == 25

    again = Feed(connection, RUN, wanted, sink, window=100)
    again.turn(0.01)
    assert connection.llen(f"rq:queue:{QUEUE}") == 15
    with running_worker(redis_url):
        finish(again)
    assert sink.names == names(wanted)
    assert jobs_in_redis(connection) == 0


def test_rows_that_still_wait_or_run_are_not_enqueued_twice(connection: redis.Redis) -> None:
    Feed(connection, RUN, rows(25), Kept()).turn(0.01)
    Feed(connection, RUN, rows(25), Kept()).turn(0.01)
    queue = Queue(QUEUE, connection=connection, serializer=JSONSerializer)
    assert len(queue.job_ids) == len(set(queue.job_ids)) == 25


def test_the_results_of_rows_that_are_done_or_edited_are_swept_away(
    redis_url: str, connection: redis.Redis
) -> None:
    Feed(connection, RUN, rows(10), Kept()).turn(0.01)
    feed = Feed(connection, RUN, rows(3), Kept())
    with running_worker(redis_url):
        finish(feed)
        wait_for(lambda: not connection.llen(f"rq:queue:{QUEUE}"))
        wait_for(lambda: connection.zcard(f"rq:finished:{QUEUE}") == 7)
        feed.sweep()
    assert jobs_in_redis(connection) == 0


def test_a_failure_is_a_result_with_the_workers_sentence(
    redis_url: str, connection: redis.Redis
) -> None:
    sink = Kept()
    with running_worker(redis_url):
        finish(Feed(connection, RUN, rows(3, max_completion_tokens=20_000), sink))
    assert {result.code for result in sink.results} == {"invalid_request"}
    assert "at most 10000 fit" in sink.results[0].reason


def test_a_bad_row_is_a_result_without_a_job(connection: redis.Redis) -> None:
    sink = Kept()
    bad = BadRow(4, None, "unparsable", "line 4: not JSON", "0" * 24, False)
    finish(Feed(connection, RUN, [bad], sink))
    assert [(result.code, result.reason) for result in sink.results] == [
        ("unparsable", "line 4: not JSON")
    ]
    assert jobs_in_redis(connection) == 0


def test_a_cancelled_row_is_a_result_and_is_heard_of(connection: redis.Redis) -> None:
    sink, wanted = Kept(), rows(2)
    feed = Feed(connection, RUN, wanted, sink)
    feed.turn(0.01)
    assert Producer(connection).cancel(job_id_of(RUN, wanted[0])) == "cancelled"
    feed.turn(0.05)
    wait_for(lambda: feed.turn(0.05) or sink.results)
    assert [(result.row.custom_id, result.code) for result in sink.results] == [("r0", "cancelled")]


@pytest.mark.parametrize(
    "how", ["deleted", "cancelled by RQ alone", "result expired", "result of another type"]
)
def test_what_the_stream_does_not_tell_is_found_by_looking(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(feed_module, "RECONCILE_SECONDS", 0.1)
    wanted, sink = rows(1), Kept()
    feed = Feed(connection, RUN, wanted, sink)
    feed.turn(0.01)
    job_id = job_id_of(RUN, wanted[0])
    if how == "deleted":
        connection.delete(f"rq:job:{job_id}")
    elif how.startswith("result"):
        connection.lrem(f"rq:queue:{QUEUE}", 0, job_id)
        connection.hset(f"rq:job:{job_id}", "status", "finished")
        if how == "result of another type":
            connection.set(results_key(job_id), "x")
    else:
        connection.lrem(f"rq:queue:{QUEUE}", 0, job_id)
        connection.hset(f"rq:job:{job_id}", "status", "canceled")
    with running_worker(redis_url):
        finish(feed)
    (result,) = sink.results
    assert result.ok == (how != "cancelled by RQ alone")


def test_a_row_that_is_lost_again_and_again_fails_in_the_end(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "RECONCILE_SECONDS", 0.0)
    sink, wanted = Kept(), rows(1)
    feed = Feed(connection, RUN, wanted, sink)
    while feed.busy:
        feed.turn(0.01)
        connection.flushall()
    assert [result.code for result in sink.results] == ["lost"]


def test_failures_of_an_earlier_run_are_run_again_where_that_is_wanted(
    redis_url: str, connection: redis.Redis
) -> None:
    wanted = rows(2)
    Feed(connection, RUN, wanted, Kept()).turn(0.01)
    connection.delete(f"rq:queue:{QUEUE}")
    for row in wanted:
        connection.hset(f"rq:job:{job_id_of(RUN, row)}", "status", "failed")
    for rerun, codes in ((False, {"failed"}), (True, {""})):
        sink = Kept()
        with running_worker(redis_url):
            feed = Feed(connection, RUN, wanted, sink, rerun_failures=rerun)
            finish(feed)
        assert {result.code for result in sink.results} == codes


def test_failures_of_an_earlier_run_are_run_again_across_an_outage(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, sink = rows(2), Kept()
    Feed(connection, RUN, wanted, Kept()).turn(0.01)
    connection.delete(f"rq:queue:{QUEUE}")
    for row in wanted:
        connection.hset(f"rq:job:{job_id_of(RUN, row)}", "status", "failed")
    feed = Feed(connection, RUN, wanted, sink, rerun_failures=True)

    def away(*_args: Any) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(feed_module, "delete_jobs", away)
        with pytest.raises(redis.ConnectionError):
            feed.turn(0.01)
    feed.recover()
    with running_worker(redis_url):
        finish(feed)
    assert {result.code for result in sink.results} == {""}


def test_stopping_takes_waiting_rows_out_and_keeps_those_that_run(
    redis_url: str, connection: redis.Redis
) -> None:
    sink, wanted = Kept(), rows(50, max_completion_tokens=60)
    feed = Feed(connection, RUN, wanted, sink, window=20)
    with running_worker(redis_url, max_rows=4, step_seconds=0.01):
        feed.turn(0.01)
        wait_for(lambda: connection.llen(f"rq:queue:{QUEUE}") == 16)
        feed.stop()
        finish(feed)
    assert sorted(r.row.custom_id for r in sink.results) == sorted(
        {str(r.row.custom_id) for r in sink.results}
    )
    assert 4 <= len(sink.results) < 12
    assert jobs_in_redis(connection) == 0
    assert connection.llen(f"rq:queue:{QUEUE}") == 0


def test_a_result_stays_in_redis_until_the_sink_has_it(
    redis_url: str, connection: redis.Redis
) -> None:
    class Full(Kept):
        def commit(self, results: Sequence[RowResult]) -> None:
            assert jobs_in_redis(connection) == 5
            raise OSError(28, "No space left on device")

    feed = Feed(connection, RUN, rows(5), Full())
    with running_worker(redis_url), pytest.raises(OSError, match="No space left"):
        finish(feed)
    assert jobs_in_redis(connection) == 5
    sink = Kept()
    finish(Feed(connection, RUN, rows(5), sink))
    assert len(sink.results) == 5


def test_a_client_that_slept_enqueues_nothing_that_another_has(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, awake = (Feed(connection, RUN, rows(3), Kept()) for _ in range(2))
    workers = table(connection, "worker-a"), table(connection, "worker-b")
    enqueue, claimed = asleep._enqueue, []

    def sleep_first(flights: list[InFlight]) -> None:
        awake.turn(0)
        claimed.extend(claim(workers[0], 8))
        enqueue(flights)

    monkeypatch.setattr(asleep, "_enqueue", sleep_first)
    asleep.turn(0)
    assert len(claimed) == 3
    assert claim(workers[1], 8) == []
    assert connection.zcard(f"rq:wip:{QUEUE}") == 3
