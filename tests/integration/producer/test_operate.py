"""What an operator types: batches, pause, resume, drain and delete."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from rq.cli import main as rq_cli
from rq.command import send_shutdown_command

from omlx_producer import UnknownJob
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.collector import Collector
from omlx_producer.cli.main import cli
from omlx_producer.wire import events_key
from tests.helpers.bulk_rows import RUN, Kept, batches_of_run, rows
from tests.helpers.bulk_runs import jobs_in_redis, upload
from tests.helpers.leases import claim, table
from tests.helpers.screens import attach
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    run_burst,
    running_worker,
    started,
    status,
    wait_for,
)
from tests.integration.producer.bulk.conftest import Run, run  # noqa: F401

LONG = 9000


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def batch_of(connection: redis.Redis, count: int, **fields: Any) -> Batch:
    batch = Batch.create(connection)
    batch.upload(rows(count, **fields))
    return batch


def names_of_workers(run: Run) -> list[str]:  # noqa: F811
    (model,) = objects(run("status", "--json").stdout)
    return [worker["name"] for worker in model["workers"]]


def test_what_waits_for_a_wrong_name_is_removed_as_status_says(
    run: Run,  # noqa: F811
    redis_url: str,
    connection: redis.Redis,
) -> None:
    run("x", "-m", "nosuch", "--queue-anyway", "--detach")
    batch = upload(connection, 1, "nosuch")
    told = " ".join(run("status").stdout.split())
    said = "no worker serves nosuch; if its name is wrong, remove what waits: (rq .*), and omlx-sub"
    [command] = re.findall(said, told)
    words = command.replace("URL", redis_url).split()
    assert CliRunner().invoke(rq_cli, words[1:]).exit_code == 0
    assert "remove what waits: omlx-submit cancel BATCH, see omlx-submit batches" in " ".join(
        run("status").stdout.split()
    )
    run("cancel", batch.id)
    assert "nosuch" not in run("status").stdout


def test_a_paused_model_takes_no_jobs_and_finishes_those_that_run(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    with running_worker(redis_url, step_seconds=0.01):
        first = enqueue(connection, max_completion_tokens=60)
        wait_for(lambda: len(events(connection, first.id)) > 2)
        assert run("pause", ALIAS).stdout == f"{ALIAS} paused\n"
        assert run("pause", ALIAS).stdout == f"{ALIAS} already paused\n"
        second, batch = enqueue(connection), batch_of(connection, 2)
        wait_for(lambda: is_over(first))
        assert status(first) == "finished"
        shown = " ".join(run("status").stdout.split())
        assert f"{ALIAS} is paused; omlx-submit resume {ALIAS} lets it go on" in shown
        assert [model["paused"] for model in objects(run("status", "--json").stdout)] == [True]
        assert (status(second), batch.read().left) == ("queued", 2)
        assert objects(run("resume", ALIAS, "--json").stdout) == [
            {"model": ALIAS, "outcome": "resumed"}
        ]
        wait_for(lambda: is_over(second) and batch.read().over)
    assert run("resume", ALIAS).stdout == f"{ALIAS} not paused\n"


def test_a_pause_concerns_one_model_and_a_misspelt_one_is_refused(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    connection.sadd("omlx:paused", "other")
    job = enqueue(connection)
    run_burst(redis_url)
    assert status(job) == "finished"
    for command in ("pause", "resume"):
        refused = run(command, "fakke")
        assert refused.exit_code == 2
        sentence = "MODEL: got 'fakke', which nobody serves (known: fake); give a known one"
        assert sentence in refused.stderr
    assert run("resume", "fake").stdout == "fake not paused\n"
    # Nobody serves it, but it is paused.
    assert run("resume", "other").stdout == "other resumed\n"


def test_a_drained_worker_finishes_its_jobs_and_ends(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=60) for _ in range(3)]
    with running_worker(redis_url, max_rows=2, step_seconds=0.01) as worker:
        wait_for(lambda: names_of_workers(run) and started(connection) == 2)
        assert run("drain", worker.name).stdout == f"{worker.name} draining\n"
        # A second one is no second signal.
        send_shutdown_command(connection, worker.name)
        worker.test_thread.join(20)
        assert not worker.test_thread.is_alive()
    assert [status(job) for job in jobs] == ["finished", "finished", "queued"]
    refused = run("drain", worker.name)
    assert refused.exit_code == 2
    sentence = f"WORKER: got '{worker.name}', which is not running (running: none); give one that"
    assert sentence in refused.stderr


def test_deleted_jobs_leave_nothing_behind_and_running_ones_stop(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    ended = enqueue(connection)
    run_burst(redis_url)
    with running_worker(redis_url, max_rows=1, step_seconds=0.01, lease_seconds=600) as worker:
        runs = enqueue(connection, max_completion_tokens=LONG)
        wait_for(lambda: len(events(connection, runs.id)) > 2)
        waits = enqueue(connection)
        done = run("delete", ended.id, runs.id, waits.id)
        assert (done.exit_code, done.stdout.count(" deleted\n")) == (0, 3)
        wait_for(lambda: not len(worker.leases), what="the job to leave its worker")
    assert jobs_in_redis(connection) == 0
    assert not connection.exists(*(events_key(job.id) for job in (ended, waits)))


def test_a_deleted_batch_leaves_nothing_behind_while_its_rows_run(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    batch, kept = batch_of(connection, 5, max_completion_tokens=LONG), batch_of(connection, 1)
    with running_worker(redis_url, max_rows=2, step_seconds=0.01):
        wait_for(lambda: jobs_in_redis(connection) == 2)
        refused = run("delete", f"row-{batch.run}-1")
        assert refused.exit_code == 2
        assert "is a row of a batch; cancel or delete the batch" in refused.stderr
        assert run("delete", batch.id).stdout == f"{batch.id} deleted\n"
        wait_for(lambda: kept.read().over, what="the other batch, whose rows had no room before")
    # A row that ended a moment before leaves its events to their readers for a minute.
    left = connection.keys(f"*{batch.run}*")
    assert all(key.startswith(events_key("").encode()) for key in left)
    assert all(0 < connection.ttl(key) <= 60 for key in left)
    with pytest.raises(UnknownJob):
        batch.read()


def test_the_batch_of_a_run_is_listed_and_deleted_like_others(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    Collector(connection, RUN, rows(3), Kept()).turn(0)
    run_burst(redis_url)
    (batch,) = batches_of_run(connection)
    (listed_batch,) = objects(run("batches", "--json").stdout)
    assert (listed_batch["id"], listed_batch["ok"]) == (batch.id, 3)
    assert run("delete", batch.id).exit_code == 0
    assert connection.keys("omlx:batch*") == []


def test_a_run_whose_batch_is_deleted_ends_as_cancelled(
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    wanted, sink = rows(3), Kept()
    collector = Collector(connection, RUN, wanted, sink)
    collector.turn(0)
    claim(table(connection))
    (batch,) = batches_of_run(connection)
    assert run("delete", batch.id).exit_code == 0
    assert connection.hkeys(batch.key) == [b"cancelled_by"]
    assert all(connection.ttl(key) > 0 for key in connection.keys("omlx:batch*"))
    collector.turn(0)
    assert "@" in collector.cancelled
    assert (collector.busy, collector.waited, sink.results) == (False, wanted, [])
    assert jobs_in_redis(connection) == 0
    assert objects(run("batches", "--json").stdout) == []
    Collector(connection, RUN, wanted, sink).turn(0)
    (batch,) = batches_of_run(connection)
    assert batch.read().left == 3


@pytest.mark.parametrize("state", ["uploading", "done", "cancelled"])
def test_a_batch_can_be_deleted_in_any_state(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
    state: str,
) -> None:
    batch = Batch.create(connection) if state == "uploading" else batch_of(connection, 2)
    if state == "done":
        run_burst(redis_url)
    elif state == "cancelled":
        batch.cancel()
    assert batch.read().state == state
    assert run("delete", batch.id).exit_code == 0
    # Whoever fetches its results meanwhile.
    batch.drop_results("results.jsonl")
    assert connection.keys("omlx:batch*") == []


def test_batches_are_listed_with_their_progress_age_and_size(
    redis_url: str,
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    done = batch_of(connection, 3)
    run_burst(redis_url)
    waits = batch_of(connection, 2, max_completion_tokens=LONG)
    connection.hincrbyfloat(done.key, "created_at", -3600)
    found = objects(run("batches", "--json").stdout)
    assert [(batch["id"], batch["state"], batch["left"]) for batch in found] == [
        (waits.id, "open", 2),
        (done.id, "done", 0),
    ]
    assert 3600 <= time.time() - found[1]["created_at"] < 4600
    assert 300 < found[0]["bytes"] < 5000
    lines = run("batches").stdout.splitlines()
    (line,) = (line for line in lines if done.id in line)
    assert re.search(r"done +3/3 +0 +1 h 00 min +\d (B|KiB) +fake", line), line


def test_a_list_is_printed_where_the_width_is_not_known(
    connection: redis.Redis,
    run: Run,  # noqa: F811
) -> None:
    batch = batch_of(connection, 3)
    assert batch.id in run("batches", env={"COLUMNS": "0"}).stdout


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_lists_keep_words_and_figures_whole_at_any_width(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,  # noqa: F811
    columns: int,
) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    batch = batch_of(connection, 3)
    connection.hset(batch.key, mapping={"rows": 1234567, "ok": 1000000, "state": "cancelling"})
    connection.hincrbyfloat(batch.key, "created_at", -7 * 86_400)
    screen = attach(monkeypatch, columns, stream="stdout")
    cli(["batches"], standalone_mode=False)
    lines = screen.lines
    assert max(map(len, lines)) <= columns
    assert {batch.id, "cancelling", "1000000/1234567", "7"} <= set(" ".join(lines).split())
    assert len(lines) == 3
