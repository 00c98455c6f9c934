"""The batch of a run against a real server and real workers: windows, kills, losses, interrupts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from rq.defaults import RQ_KEY_PREFIX as RQ

from omlx_producer import Producer
from omlx_producer.bulk import collector as collector_module
from omlx_producer.bulk.batch import Batch, run_batches
from omlx_producer.bulk.collector import Collector
from omlx_producer.bulk.row import BadRow, Row, RowResult
from omlx_producer.connection import connect
from omlx_producer.wire import GenerationRequest
from tests.helpers.bulk_rows import (
    QUEUE,
    RUN,
    Kept,
    batches_of_run,
    names,
    rows,
    rows_in_redis,
    waiting_rows,
)
from tests.helpers.bulk_runs import jobs_in_redis
from tests.helpers.leases import claim, commit, done, failed, stopped, table
from tests.helpers.server_time import forward
from tests.helpers.workers import run_burst, running_worker, wait_for


def finish(collector: Collector, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while collector.busy:
        collector.turn(0.05)
        assert time.monotonic() < deadline, "the collector does not end"


def keys_of_run(connection: redis.Redis) -> list[str]:
    return sorted(key.decode() for key in connection.scan_iter(f"omlx:batch:{RUN}*"))


def test_rows_of_long_prompts_wait_for_room(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.collector.WINDOW_SIZE", 30)
    collector = Collector(connection, RUN, rows(20), Kept(), window=100)
    for _ in range(3):
        collector.turn(0.01)
    # Eight characters each: the fourth goes over the limit, and lets no other in.
    assert collector.in_flight == 4


def test_rows_are_read_past_a_full_window_up_to_a_number(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "HELD_ROWS", 150)
    source = iter(rows(500))
    collector = Collector(connection, RUN, source, Kept(), window=10)
    for _ in range(5):
        collector.turn(0.01)
    assert len(list(source)) == 500 - 10 - 150


def test_a_model_that_nobody_serves_holds_up_no_row_of_another(
    redis_url: str, connection: redis.Redis
) -> None:
    asleep, served, kept = rows(300, model="asleep"), rows(100, start=300), Kept()
    collector = Collector(connection, RUN, [*asleep, *served], kept, window=20)
    deadline = time.monotonic() + 20
    with running_worker(redis_url):
        while len(kept.results) < len(served):
            collector.turn(0.05)
            assert time.monotonic() < deadline
    assert kept.names == names(served)
    assert collector.in_flight == 20, "a window of the model that nobody serves"
    collector.stop()
    finish(collector)
    assert kept.names == names(served)


def test_rows_publish_no_tokens(redis_url: str, connection: redis.Redis) -> None:
    asked = rows(5)
    listener: Any = connection.pubsub()
    listener.psubscribe("omlx:tokens:*")
    collector = Collector(connection, RUN, asked, Kept())
    with running_worker(redis_url):
        finish(collector)
    messages = iter(lambda: listener.get_message(timeout=0.2), None)
    heard = [message["data"] for message in messages if message["type"] == "pmessage"]
    listener.close()
    assert len(heard) == 5
    assert all(b'"type":"done"' in data for data in heard)


def test_a_failure_is_a_result_with_the_workers_sentence(
    redis_url: str, connection: redis.Redis
) -> None:
    sink = Kept()
    with running_worker(redis_url):
        finish(Collector(connection, RUN, rows(3, max_completion_tokens=20_000), sink))
    assert {result.code for result in sink.results} == {"invalid_request"}
    assert "at most 10000 fit" in sink.results[0].reason


def test_a_bad_row_is_a_result_without_a_job(connection: redis.Redis) -> None:
    sink = Kept()
    bad = BadRow(4, None, "unparsable", "line 4: not JSON", "0" * 24, False)
    finish(Collector(connection, RUN, [bad], sink))
    assert [(result.code, result.reason) for result in sink.results] == [
        ("unparsable", "line 4: not JSON")
    ]
    assert jobs_in_redis(connection) == 0


def test_a_row_whose_twin_is_refused_while_it_waits_has_its_own_result(
    redis_url: str, connection: redis.Redis
) -> None:
    wanted, sink = rows(150), Kept()
    twin = BadRow(151, "r0", "duplicate_custom_id", "given already", wanted[0].digest, False)
    collector = Collector(connection, RUN, [*wanted, twin], sink)
    for _ in range(2):
        collector.turn(0.01)
    with running_worker(redis_url):
        finish(collector)
        collector.sweep()
    assert sink.names == sorted([*names(wanted), "r0"])
    assert [result.line for result in sink.results if not result.ok] == [151]


def test_all_rows_come_back_and_nothing_stays(redis_url: str, connection: redis.Redis) -> None:
    wanted, sink = rows(300), Kept()
    collector = Collector(connection, RUN, wanted, sink, window=64)
    with running_worker(redis_url):
        finish(collector)
        collector.sweep()
    assert sink.names == names(wanted)
    assert all(result.ok for result in sink.results)
    assert jobs_in_redis(connection) == rows_in_redis(connection) == 0
    leftovers = [*connection.scan_iter(f"{RQ}:results:*"), *connection.scan_iter("omlx:batches*")]
    leftovers += [*connection.scan_iter(f"{RQ}:finished:*"), *connection.scan_iter("omlx:events:*")]
    assert [key for key in leftovers if connection.ttl(key) < 0] == []
    for key in connection.scan_iter("omlx:batch:*"):
        assert connection.ttl(key) > 0, key


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_run_ends_with_either_protocol_of_redis(
    redis_url: str, connection: redis.Redis, protocol: int
) -> None:
    sink = Kept()
    with (
        connect(f"{redis_url}?protocol={protocol}") as client,
        running_worker(redis_url),
    ):
        finish(Collector(client, RUN, rows(3), sink))
    assert sink.names == names(rows(3))


def test_the_next_window_is_uploaded_when_half_of_the_last_has_ended(
    connection: redis.Redis,
) -> None:
    collector, leases = Collector(connection, RUN, rows(100), Kept(), window=20), table(connection)
    collector.turn(0.01)
    held = claim(leases, 20)
    assert collector.in_flight == len(held) == 20
    for ended, in_flight in ((9, 11), (1, 10 + 20), (10, 20)):
        for job in held[:ended]:
            commit(leases, job, done(job.id))
        held = held[ended:]
        for _ in range(2):
            collector.turn(0.01)
        assert collector.in_flight == in_flight


def test_no_more_than_two_windows_are_in_redis(redis_url: str, connection: redis.Redis) -> None:
    collector = Collector(connection, RUN, rows(300), Kept(), window=30)
    straggler, most = table(connection), 0
    collector.turn(0.01)
    (held,) = claim(straggler)
    with running_worker(redis_url, max_rows=8):
        while collector.in_flight > 1 or collector._held:
            collector.turn(0.01)
            most = max(most, sum(batch.read().left for batch in batches_of_run(connection)))
        assert 30 < most <= 60
        commit(straggler, held, done(held.id))
        finish(collector)


def test_what_a_killed_client_has_left_runs_on_and_is_not_run_again(
    redis_url: str, connection: redis.Redis
) -> None:
    wanted, sink = rows(40), Kept()
    Collector(connection, RUN, rows(25), Kept(), window=25).turn(0.01)
    run_burst(redis_url)
    assert jobs_in_redis(connection) == 0
    (left,) = batches_of_run(connection)
    assert connection.hlen(left.results_key) == 25

    again = Collector(connection, RUN, wanted, sink, window=100)
    again.turn(0.01)
    assert len(waiting_rows(connection)) == 15
    with running_worker(redis_url):
        finish(again)
    assert sink.names == names(wanted)
    assert rows_in_redis(connection) == 0


@pytest.mark.parametrize("claimed", [0, 5])
def test_rows_that_still_wait_or_run_are_not_uploaded_twice(
    connection: redis.Redis, claimed: int
) -> None:
    Collector(connection, RUN, rows(25), Kept()).turn(0.01)
    claim(table(connection), claimed)
    Collector(connection, RUN, rows(25), Kept()).turn(0.01)
    waiting = waiting_rows(connection)
    assert len(waiting) == len(set(waiting)) == 25 - claimed


def test_a_run_whose_room_is_full_of_rows_that_it_no_longer_has_waits_between_its_looks(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Collector(connection, RUN, rows(10), Kept(), window=10)
    killed.turn(0.01)
    edited = Collector(connection, RUN, rows(10, start=10), Kept(), window=10)
    pauses: list[float] = []
    monkeypatch.setattr(collector_module.time, "sleep", pauses.append)
    for _ in range(5):
        edited.turn(0.05)
    assert pauses == [0.05] * 5


def test_the_rows_that_are_done_or_edited_are_swept_away(
    redis_url: str, connection: redis.Redis
) -> None:
    Collector(connection, RUN, rows(10), Kept()).turn(0.01)
    leases = table(connection)
    for job in claim(leases, 2):
        commit(leases, job, done(job.id))
    collector = Collector(connection, RUN, rows(1, start=100), Kept())
    collector.turn(0.01)
    with running_worker(redis_url):
        finish(collector)
        collector.sweep()
    assert jobs_in_redis(connection) == 0
    assert rows_in_redis(connection) == 0


def test_an_abandoned_run_takes_its_rows_out_whatever_it_did_a_moment_before(
    connection: redis.Redis,
) -> None:
    collector, leases = Collector(connection, RUN, rows(5), Kept()), table(connection)
    collector.turn(0.01)
    claimed = claim(leases, 2)
    collector.stop()
    collector.turn(0.01)
    leases.give_back(claimed)
    collector.abandon()
    assert rows_in_redis(connection) == jobs_in_redis(connection) == 0


def test_a_run_whose_last_rows_are_withdrawn_leaves_nothing_for_ever(
    connection: redis.Redis,
) -> None:
    Collector(connection, RUN, rows(10), Kept()).turn(0.01)
    leases = table(connection)
    for job in claim(leases, 2):
        commit(leases, job, done(job.id))
    again = Collector(connection, RUN, rows(0), Kept())
    finish(again)
    again.sweep()
    assert keys_of_run(connection) == []


def test_a_run_that_is_begun_again_does_not_expire_while_its_rows_wait(
    connection: redis.Redis,
) -> None:
    for _ in range(2):
        Collector(connection, RUN, rows(10), Kept()).turn(0.01)
        assert [key for key in keys_of_run(connection) if connection.ttl(key) > 0] == []


@pytest.mark.usefixtures("server_time")
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_cancelled_row_is_a_result(redis_url: str, connection: redis.Redis, when: str) -> None:
    sink, wanted = Kept(), rows(2)
    collector = Collector(connection, RUN, wanted, sink)
    collector.turn(0.01)
    leases = table(connection)
    (claimed,) = claim(leases)
    if when == "waiting":
        leases.give_back([claimed])
    assert Producer(connection).cancel(claimed.id) in ("cancelled", "stopping")
    if when == "running":
        forward(connection, 31)
    with running_worker(redis_url):
        finish(collector)
    codes = {str(result.row.custom_id): result.code for result in sink.results}
    assert codes.pop(claimed.row.custom_id) == "cancelled"
    assert set(codes.values()) == {""}


@pytest.mark.parametrize("lost", ["everything", "row"])
def test_what_a_server_has_lost_is_uploaded_or_found_again(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(collector_module, "RECONCILE_SECONDS", 0.1)
    wanted, sink = rows(3), Kept()
    collector = Collector(connection, RUN, wanted, sink)
    collector.turn(0.01)
    if lost == "everything":
        connection.flushall()
    elif lost == "row":
        connection.lpop(batches_of_run(connection)[0].waiting_key(QUEUE))
    with running_worker(redis_url):
        finish(collector)
    assert set(sink.names) == set(names(wanted))
    assert all(result.ok for result in sink.results)


@pytest.mark.parametrize(("rerun", "codes"), [(False, {"failed"}), (True, {""})])
def test_failures_of_an_earlier_run_are_run_again_where_that_is_wanted(
    redis_url: str, connection: redis.Redis, rerun: bool, codes: set[str]
) -> None:
    wanted, sink = rows(2), Kept()
    Collector(connection, RUN, wanted, Kept()).turn(0.01)
    leases = table(connection)
    for job in claim(leases, 2):
        commit(leases, job, failed(job.id))
    with running_worker(redis_url):
        finish(Collector(connection, RUN, wanted, sink, rerun_failures=rerun))
    assert {result.code for result in sink.results} == codes


def test_no_row_is_lost_if_redis_is_away_while_its_failure_is_dropped(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, sink, acknowledge = rows(2), Kept(), Batch.acknowledge
    Collector(connection, RUN, wanted, Kept()).turn(0.01)
    leases = table(connection)
    for job in claim(leases, 2):
        commit(leases, job, failed(job.id))

    def away(*_: Any) -> None:
        monkeypatch.setattr(Batch, "acknowledge", acknowledge)
        raise redis.ConnectionError("away")

    monkeypatch.setattr(Batch, "acknowledge", away)
    again = Collector(connection, RUN, wanted, sink, rerun_failures=True)
    with pytest.raises(redis.ConnectionError):
        again.turn(0.01)
    again.recover()
    with running_worker(redis_url):
        finish(again)
    assert sink.names == names(wanted)


@pytest.mark.parametrize("lost", ["_write", "_ring"])
def test_an_upload_whose_answer_is_lost_is_repeated_and_no_row_is_there_twice(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    whole, wanted, sink = getattr(Batch, lost), rows(5), Kept()

    def lose_the_answer(*args: Any) -> None:
        whole(*args)
        monkeypatch.setattr(Batch, lost, whole)
        raise redis.ConnectionError("away")

    monkeypatch.setattr(Batch, lost, lose_the_answer)
    collector = Collector(connection, RUN, wanted, sink)
    with pytest.raises(redis.ConnectionError):
        collector.turn(0.01)
    collector.recover()
    collector.turn(0.01)
    assert len(waiting_rows(connection)) == 5
    with running_worker(redis_url):
        finish(collector)
    assert sink.names == names(wanted)


def test_stopping_takes_waiting_rows_out_and_keeps_those_that_run(
    redis_url: str, connection: redis.Redis
) -> None:
    sink, wanted = Kept(), rows(50, max_completion_tokens=60)
    collector = Collector(connection, RUN, wanted, sink, window=20)
    with running_worker(redis_url, max_rows=4, step_seconds=0.01):
        collector.turn(0.01)
        wait_for(lambda: len(waiting_rows(connection)) == 16)
        collector.stop()
        finish(collector)
    assert len({result.row.custom_id for result in sink.results}) == len(sink.results)
    assert 4 <= len(sink.results) < 12
    assert jobs_in_redis(connection) == rows_in_redis(connection) == 0


def test_a_stopped_run_leaves_no_batch_without_rows(connection: redis.Redis) -> None:
    Collector(connection, RUN, rows(10), Kept(), window=10).turn(0.01)
    resumed = Collector(connection, RUN, rows(15, start=5), Kept(), window=10)
    resumed.turn(0.01)
    resumed.stop()
    finish(resumed, 5)
    assert keys_of_run(connection) == []


def test_stopping_needs_no_worker_for_rows_that_were_given_back(connection: redis.Redis) -> None:
    collector = Collector(connection, RUN, rows(5), Kept())
    collector.turn(0.01)
    leases = table(connection)
    leases.give_back(claim(leases, 2))
    collector.stop()
    finish(collector, 5)
    assert jobs_in_redis(connection) == rows_in_redis(connection) == 0
    assert connection.llen(f"{RQ}:queue:{QUEUE}") == 0


@pytest.mark.parametrize("client", ["here", "away"])
@pytest.mark.slow
def test_what_a_cancel_of_the_batch_has_taken_out_or_stopped_runs_with_the_next_command(
    redis_url: str, connection: redis.Redis, client: str
) -> None:
    sink, wanted = Kept(), rows(30, max_completion_tokens=60)
    collector = Collector(connection, RUN, wanted, sink, window=20)
    with running_worker(redis_url, max_rows=4, step_seconds=0.01):
        collector.turn(0.01)
        (batch,) = batches_of_run(connection)
        wait_for(lambda: len(waiting_rows(connection)) == 16)
        assert batch.cancel()
        if client == "here":
            finish(collector, 10)
            assert "@" in collector.cancelled
            assert {row.custom_id for row in collector.waited} | set(sink.names) == {
                row.custom_id for row in wanted[:20]
            }
        wait_for(lambda: all(each.over for each in run_batches(connection, RUN)))
        assert jobs_in_redis(connection) == 0
        done = set(sink.names)
        again = Collector(connection, RUN, [r for r in wanted if r.custom_id not in done], sink)
        finish(again)
        again.sweep()
    assert sink.names == names(wanted)
    assert all(result.ok for result in sink.results)
    assert keys_of_run(connection) == []


@pytest.mark.parametrize("then", ["it runs", "it is cancelled", "the command is stopped"])
def test_a_row_that_the_cancel_of_an_earlier_command_stops_late_counts_as_not_run(
    redis_url: str, connection: redis.Redis, then: str
) -> None:
    sink, wanted, leases = Kept(), rows(2), table(connection)
    Collector(connection, RUN, wanted, Kept()).turn(0.01)
    (runs,) = claim(leases)
    assert batches_of_run(connection)[0].cancel()
    again = Collector(connection, RUN, wanted, sink)
    again.turn(0.01)
    if then == "the command is stopped":
        again.stop()
    commit(leases, runs, stopped(runs.id))
    for _ in range(2):
        again.turn(0.01)
    if then == "it is cancelled":
        for job in claim(leases, 2):
            commit(leases, job, stopped(job.id))
    elif then == "it runs":
        run_burst(redis_url)
    finish(again)
    assert [(result.row.custom_id, result.code) for result in sink.results] == {
        "it runs": [("r1", ""), ("r0", "")],
        "it is cancelled": [("r1", "cancelled"), ("r0", "cancelled")],
        "the command is stopped": [],
    }[then]
    assert rows_in_redis(connection) == 0


def test_a_result_stays_in_redis_until_the_sink_has_it(connection: redis.Redis) -> None:
    class Full(Kept):
        def commit(self, results: Sequence[RowResult]) -> None:
            raise OSError(28, "No space left on device")

    collector = Collector(connection, RUN, rows(1), Full())
    collector.turn(0.01)
    leases = table(connection)
    for job in claim(leases, 1):
        commit(leases, job, done(job.id))
    with pytest.raises(OSError, match="No space left"):
        finish(collector)
    sink = Kept()
    # No worker runs the row again.
    finish(Collector(connection, RUN, rows(1), sink))
    assert sink.names == names(rows(1))


def test_rows_of_a_model_that_nobody_serves_do_not_keep_a_run_from_the_others(
    redis_url: str, connection: redis.Redis
) -> None:
    asleep = [
        Row(f"x{n}", n, GenerationRequest(model="asleep", prompt="x"), f"{n:024x}")
        for n in range(3)
    ]
    sink = Kept()
    collector = Collector(connection, RUN, [*asleep, *rows(4)], sink)
    with running_worker(redis_url):
        deadline = time.monotonic() + 20
        while len(sink.results) < 4 and time.monotonic() < deadline:
            collector.turn(0.05)
    assert sink.names == names(rows(4))
    assert collector.in_flight == 3
