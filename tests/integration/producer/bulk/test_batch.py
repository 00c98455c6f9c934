"""Detached batches: uploaded, fed by anyone, taken over, cancelled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.lock import Lock

from omlx_producer.bulk.batch import BATCHES_KEY, Batch
from omlx_producer.bulk.batch_feeder import BatchFeed, BatchSink, Feeder, LockLost
from omlx_producer.bulk.row import BadRow, RowResult
from tests.helpers.bulk_runs import (
    jobs_in_redis,
    spawn,
    wait_for_model,
)
from tests.helpers.workers import ALIAS, running_worker, wait_for, worker_process
from tests.integration.producer.bulk.conftest import Run
from tests.integration.producer.bulk.test_feed import rows


def batch_of(connection: redis.Redis, count: int, window: int = 64) -> Batch:
    batch = Batch.create(connection, window=window)
    batch.upload(rows(count))
    return batch


def feed_all(connection: redis.Redis, seconds: float = 30.0) -> None:
    feeder, deadline = Feeder(connection), time.monotonic() + seconds
    feeder.turn()
    while not feeder.idle:
        feeder.turn()
        assert time.monotonic() < deadline, "the batches do not end"


def custom_ids(batch: Batch) -> list[str]:
    return [json.loads(line)["custom_id"] for line in batch.results(batch.read().rows)]


def test_a_batch_is_fed_to_its_end_in_windows(redis_url: str, connection: redis.Redis) -> None:
    batch = batch_of(connection, 150, window=20)
    state = batch.read()
    assert (state.state, state.rows, state.ok) == ("open", 150, 0)
    assert jobs_in_redis(connection) == 0
    feed = BatchFeed.begin(batch)
    assert feed is not None
    most = 0
    with running_worker(redis_url, max_rows=8):
        while feed.turn(0.01):
            most = max(most, jobs_in_redis(connection))
    assert most == 20
    state = batch.read()
    assert (state.state, state.ok, state.failed) == ("done", 150, 0)
    assert state.completion_tokens > 300
    # In the order of the input, whatever the order of the ends was.
    assert custom_ids(batch) == [f"r{n}" for n in range(150)]
    assert jobs_in_redis(connection) == 0
    assert connection.ttl(batch.key) > 0
    assert not connection.exists(batch.rows_key)
    assert connection.zcard(BATCHES_KEY) == 0


def test_rows_that_can_never_run_have_their_error_at_once(connection: redis.Redis) -> None:
    batch = Batch.create(connection)
    bad = BadRow(2, None, "unparsable", "line 2: not JSON", "0" * 24, False)
    batch.upload([*rows(1), bad])
    assert batch.read().failures == {"unparsable": 1}
    assert custom_ids(batch) == [None]


def test_an_upload_that_is_cut_off_is_never_fed_and_expires(connection: redis.Redis) -> None:
    batch = Batch.create(connection)

    def breaking():
        yield from rows(300)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.upload(breaking())
    assert BatchFeed.begin(batch) is None
    assert 0 < connection.ttl(batch.key) <= 3600
    assert 0 < connection.ttl(batch.rows_key) <= 3600
    assert Feeder(connection).idle


def test_one_feeder_has_a_batch_and_the_next_takes_over(connection: redis.Redis) -> None:
    batch = batch_of(connection, 10)
    first = BatchFeed.begin(batch)
    assert first is not None
    assert BatchFeed.begin(batch) is None
    first.leave()
    assert BatchFeed.begin(batch) is not None


def test_a_feeder_that_was_away_too_long_can_write_nothing(connection: redis.Redis) -> None:
    batch = batch_of(connection, 2)
    lock = Lock(connection, batch.lock_key, timeout=15, thread_local=False)
    assert lock.acquire(blocking=False)
    sink = BatchSink(batch, lock.local.token)
    result = RowResult(next(batch.unfinished()), "bulk-1-1", body={"usage": {}})
    connection.set(batch.lock_key, "another")
    with pytest.raises(LockLost):
        sink.commit([result])
    assert batch.read().ok == 0
    assert len(list(batch.unfinished())) == 2


def test_a_result_that_is_committed_twice_counts_once(connection: redis.Redis) -> None:
    batch = batch_of(connection, 2)
    connection.set(batch.lock_key, "token")
    sink = BatchSink(batch, b"token")
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
        "speculation": {"drafted": 6, "accepted": [3, 2]},
    }
    result = RowResult(next(batch.unfinished()), "bulk-1-1", body={"usage": usage})
    sink.commit([result])
    sink.commit([result])
    state = batch.read()
    assert (state.ok, state.prompt_tokens, state.completion_tokens) == (1, 3, 4)
    assert (state.cached_tokens, state.drafted, state.accepted) == (2, 6, 5)
    assert [row.custom_id for row in batch.unfinished()] == ["r1"]


def test_rows_whose_results_redis_has_lost_run_again(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.batch_feeder.LOOK_SECONDS", 0.0)
    batch, feeder = batch_of(connection, 6, window=2), Feeder(connection)
    keys = [batch.key, batch.rows_key]
    before = [connection.dump(key) for key in keys]
    with running_worker(redis_url):
        while batch.read().ok < 3:
            feeder.turn()
        connection.delete(batch.results_key)
        for key, value in zip(keys, before, strict=True):
            connection.restore(key, 0, value, replace=True)
        wait_for(lambda: feeder.turn() or feeder.idle)
    assert (batch.read().state, batch.read().ok) == ("done", 6)
    assert custom_ids(batch) == [f"r{n}" for n in range(6)]


def test_a_batch_does_not_end_while_a_row_is_left(connection: redis.Redis) -> None:
    batch = batch_of(connection, 2)
    assert not batch.end("done")
    assert batch.read().state == "open"
    assert [row.custom_id for row in batch.unfinished()] == ["r0", "r1"]
    assert batch.end("cancelled")


def test_a_batch_whose_rows_come_back_at_its_end_does_not_end(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(connection, 1)
    row = connection.dump(batch.rows_key)
    connection.delete(batch.rows_key)
    execute = redis.client.Pipeline.execute

    def restart(pipe: redis.client.Pipeline, *args: Any, **options: Any) -> Any:
        if pipe.watching:
            connection.restore(batch.rows_key, 0, row)
        return execute(pipe, *args, **options)

    monkeypatch.setattr(redis.client.Pipeline, "execute", restart)
    assert not batch.end("done")
    assert batch.read().state == "open"


def packed(*document: Any) -> bytes:
    return zlib.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        (b"x", "unparsable"),
        (packed("r0"), "unparsable"),
        (packed("r0", "0" * 24, {"model": ALIAS, "prompt": "x", "newer": 1}), "invalid_request"),
    ],
    ids=["no-row", "another-shape", "newer-field"],
)
def test_a_row_that_cannot_be_read_fails_and_the_others_run(
    redis_url: str, connection: redis.Redis, stored: bytes, code: str
) -> None:
    batch, other = batch_of(connection, 1), batch_of(connection, 2)
    connection.delete(batch.rows_key)
    connection.xadd(batch.rows_key, {"row": stored}, id="1-0")
    with running_worker(redis_url):
        feed_all(connection)
    state = batch.read()
    assert (state.state, state.ok, state.failures) == ("done", 0, {code: 1})
    assert custom_ids(batch) == [None if code == "unparsable" else "r0"]
    assert other.read().ok == 2


def test_a_broken_batch_is_dropped_with_one_line_and_the_others_run(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.batch_feeder.LOOK_SECONDS", 0.0)
    wrong_type, wrong_field, other = (batch_of(connection, 2) for _ in range(3))
    connection.delete(wrong_type.rows_key)
    connection.set(wrong_type.rows_key, "x")
    connection.hset(wrong_field.key, "window", "x")
    with running_worker(redis_url):
        feed_all(connection)
    assert other.read().state == "done"
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"{wrong_field.id}: its data are broken",
        f"{wrong_type.id}: its data are broken",
    ]


def test_a_lock_that_runs_out_while_a_feeder_looks_is_no_broken_batch(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.batch_feeder.LOOK_SECONDS", 0.0)
    batch, feeder, read = batch_of(connection, 1), Feeder(connection), Batch.read

    def read_late(looked_at: Batch) -> Any:
        connection.delete(batch.lock_key)
        return dataclasses.replace(read(looked_at), state="uploading")

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "read", read_late)
        feeder.turn()
    feeder.turn()
    assert connection.exists(batch.lock_key)
    assert caplog.records == []


@pytest.mark.system
def test_feeders_killed_at_any_moment_lose_and_double_nothing(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        batch = batch_of(connection, 200, window=40)
        for _ in range(4):
            feeder = spawn(redis_url, tmp_path, "feed", "--burst")
            done = batch.read().ok
            with contextlib.suppress(AssertionError):
                wait_for(lambda done=done: batch.read().ok > done, 5)
            feeder.kill()
            feeder.communicate()
            # Its lock would run out by itself, later than a test wants to wait.
            connection.delete(batch.lock_key)
        feed_all(connection)
    state = batch.read()
    assert (state.state, state.ok) == ("done", 200)
    assert Counter(custom_ids(batch)) == Counter(f"r{n}" for n in range(200))
    assert jobs_in_redis(connection) == 0


def test_several_batches_are_fed_side_by_side(redis_url: str, connection: redis.Redis) -> None:
    batches = [batch_of(connection, 30, window=5) for _ in range(3)]
    with running_worker(redis_url):
        feed_all(connection)
    assert [batch.read().state for batch in batches] == ["done"] * 3


def test_cancelling_takes_out_what_waits_stops_what_runs_and_keeps_results(
    redis_url: str, connection: redis.Redis, run: Run
) -> None:
    batch = Batch.create(connection, window=20)
    batch.upload(rows(100, max_completion_tokens=9_000))
    with running_worker(redis_url, max_rows=4, step_seconds=0.01):
        feed = BatchFeed.begin(batch)
        assert feed is not None
        feed.turn(0.01)
        wait_for(lambda: connection.llen(f"rq:queue:omlx:{ALIAS}:bulk") == 16)
        batch.ask_to_cancel()
        deadline = time.monotonic() + 20
        while feed.turn(0.05):
            assert time.monotonic() < deadline, "the batch does not end"
    state = batch.read()
    assert (state.state, state.failures) == ("cancelled", {"cancelled": 4})
    assert jobs_in_redis(connection) == 0
    assert run("cancel", batch.id).output == "over\n"
    for command in ("watch", "results"):
        told = run(command, batch.id)
        assert told.exit_code == 1
        assert told.stderr.endswith(f"{batch.id}: cancelled, 4 of 100 rows ended\n")


def test_a_cancel_that_crosses_the_end_leaves_the_batch_done(
    redis_url: str, connection: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, read = batch_of(connection, 1), Batch.read

    def end_after_the_look(looked_at: Batch) -> Any:
        state = read(looked_at)
        monkeypatch.setattr(Batch, "read", read)
        with running_worker(redis_url):
            feed_all(connection)
        return state

    monkeypatch.setattr(Batch, "read", end_after_the_look)
    assert run("cancel", batch.id).output == "over\n"
    assert batch.read().state == "done"
    assert connection.zcard(BATCHES_KEY) == 0


def test_cancelling_needs_no_feeder(redis_url: str, connection: redis.Redis, run: Run) -> None:
    batch = batch_of(connection, 100, window=20)
    feed = BatchFeed.begin(batch)
    assert feed is not None
    feed.turn(0.01)
    # It dies and leaves twenty jobs; nobody else feeds.
    connection.delete(batch.lock_key)
    assert run("cancel", batch.id).output == "cancelled\n"
    assert jobs_in_redis(connection) == 0
    assert connection.llen(f"rq:queue:omlx:{ALIAS}:bulk") == 0


@pytest.mark.timeout(20)
def test_cancelling_takes_out_prompts_of_more_characters_than_a_window(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(connection, 20)
    feed = BatchFeed.begin(batch)
    assert feed is not None
    feed.turn(0.01)
    feed.leave()
    # Two feeders in turn may leave as much as two windows.
    monkeypatch.setattr("omlx_producer.bulk.window.WINDOW_CHARACTERS", 100)
    batch.ask_to_cancel()
    feed = BatchFeed.begin(batch)
    assert feed is not None
    while feed.turn(0.01):
        pass
    assert batch.read().state == "cancelled"
    assert jobs_in_redis(connection) == 0
