"""2,000 rows while everything is killed; batches that share workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import Row
from omlx_producer.wire import GenerationRequest, queue_name
from omlx_worker.engine.rows.request import RowRequest as EngineRow
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.bulk_runs import (
    batch_line,
    count_lines,
    errors,
    jobs_in_redis,
    lines,
    spawn,
    submit,
    wait_for_model,
    write_jsonl,
)
from tests.helpers.fake_engine import expected
from tests.helpers.fake_worker import announce
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.workers import ALIAS, wait_for, worker_process

pytestmark = pytest.mark.timeout(600)

ROWS, TOKENS = 2000, 20
KILL_SECONDS = 4.0


class Crew:
    """Two workers, of which one is killed every few seconds and another takes its place."""

    def __init__(self, url: str) -> None:
        self.killed = 0
        self._url = url
        self._stack = contextlib.ExitStack()
        self._workers = [self._start(), self._start()]
        self._due = time.monotonic() + KILL_SECONDS

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(
            worker_process(self._url, max_rows=8, step_seconds=0.01, lease_seconds=1.0)
        )

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            if time.monotonic() > self._due:
                self._workers.pop(0).kill()
                self._workers.append(self._start())
                self.killed += 1
                self._due = time.monotonic() + KILL_SECONDS
            return condition()

        wait_for(holds, 180, what)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that loses at most its last second when it is killed."""
    with redis_server("--appendonly", "yes") as started:
        yield started


def restart(server: RedisServer, connection: redis.Redis) -> None:
    """Kill a server, and start it with what it has kept."""
    server.kill()
    server.start()
    wait_for(lambda: not connection.info("persistence")["loading"], what="the server's data")


def write_seeded(path: Path) -> None:
    """Rows whose texts say whether they are the right ones."""
    rows = [batch_line(f"r{n}", f"prompt {n}", max_tokens=TOKENS, seed=n) for n in range(ROWS)]
    write_jsonl(path, rows)


def check(found: list[dict[str, Any]]) -> None:
    """Each row has one result, and it is its own."""
    assert Counter(line["custom_id"] for line in found) == Counter(f"r{n}" for n in range(ROWS))
    for line in found:
        number = int(line["custom_id"].removeprefix("r"))
        prompt = list(map(ord, f"prompt {number}"))
        text = expected(EngineRow("", prompt, TOKENS, Sampling(seed=number)))[1]
        assert line["response"]["body"]["choices"][0]["text"] == text


def test_a_run_that_is_killed_and_repeated_has_each_of_2000_results_once(
    server: RedisServer, tmp_path: Path
) -> None:
    write_seeded(tmp_path / "rows.jsonl")
    output = tmp_path / "out.jsonl"
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--window", "256", "--progress", "none")
    with redis.Redis.from_url(server.url) as connection, Crew(server.url) as crew:
        wait_for_model(connection)
        for goal in (200, 500, 900, 1300, 1700):
            client = spawn(server.url, tmp_path, *command)
            try:
                crew.wait_for(lambda goal=goal: count_lines(output) >= goal, f"{goal} lines")
                if goal == 900:
                    restart(server, connection)
                    crew.wait_for(lambda: count_lines(output) >= 1100, "lines after a server's end")
            finally:
                client.kill()
                client.communicate()
        client = spawn(server.url, tmp_path, *command)
        try:
            crew.wait_for(lambda: client.poll() is not None, "the end of the run")
        finally:
            client.kill()
            _, said = client.communicate()
        assert client.returncode == 0, said
        assert jobs_in_redis(connection) == 0
        assert not connection.keys("omlx:batch:*:waiting:*")
        assert crew.killed > 2
    assert errors(output) == []
    check(lines(output))


def test_a_detached_batch_needs_workers_alone_for_2000_results_each_once(
    server: RedisServer, tmp_path: Path
) -> None:
    write_seeded(tmp_path / "rows.jsonl")
    with redis.Redis.from_url(server.url) as connection, Crew(server.url) as crew:
        wait_for_model(connection)
        code, batch_id, said = submit(server.url, tmp_path, "run", "rows.jsonl", "--detach")
        assert code == 0, said
        batch = Batch(connection, batch_id.strip())
        crew.wait_for(lambda: batch.read().ok > ROWS / 2, "half of the rows")
        restart(server, connection)
        crew.wait_for(lambda: batch.read().over, "the end of the batch")
        state = batch.read()
        assert (state.state, state.ok, state.failed) == ("done", ROWS, 0)
        assert jobs_in_redis(connection) == 0
        assert crew.killed > 2
        check([json.loads(line) for line in batch.results(batch.read())])


OTHER, ASLEEP = "other", "asleep"
QUEUE = queue_name(ALIAS, "bulk")


@pytest.fixture
def watched() -> Iterator[RedisServer]:
    """A server that tells of every row that is taken."""
    with redis_server("--notify-keyspace-events", "Kl") as started:
        yield started


def batch_of_user(connection: redis.Redis, user: str, count: int) -> Batch:
    batch = Batch.create(connection)
    batch.upload(
        Row(
            f"{user}{n}",
            n,
            GenerationRequest(model=ALIAS, prompt=f"{user} {n}", max_completion_tokens=5 + n % 17),
            f"{user.encode().hex():0>12}{n:012x}",
        )
        for n in range(1, count + 1)
    )
    return batch


def test_two_batches_share_a_worker_and_a_model_that_nobody_serves_holds_up_no_other(
    watched: RedisServer, tmp_path: Path
) -> None:
    rows = [
        batch_line(f"{model} {n}", f"prompt {n}", model=model)
        for n, model in itertools.product(range(100), (ASLEEP, ALIAS, OTHER))
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(redis.Redis.from_url(watched.url))
        for model in (ASLEEP, ALIAS, OTHER):
            announce(connection, model)
        batches = [batch_of_user(connection, user, 400) for user in ("ann", "bob")]
        listener: Any = stack.enter_context(connection.pubsub(ignore_subscribe_messages=True))
        users = {f"__keyspace@0__:{each.waiting_key(QUEUE)}": each.run for each in batches}
        listener.subscribe(*users)
        for _ in users:
            listener.get_message(timeout=5)  # that it is subscribed

        detach = ("run", "rows.jsonl", "--detach")
        code, batch_id, said = submit(watched.url, tmp_path, *detach)
        assert code == 0, said
        file = Batch(connection, batch_id.strip())
        for model in (ALIAS, OTHER):
            stack.enter_context(
                worker_process(watched.url, alias=model, max_rows=8, step_seconds=0.005)
            )
        wait_for(lambda: all(each.read().over for each in batches), 120, "both batches")
        wait_for(lambda: file.read().ok == 200, 120, "the rows of the models that are served")
        state = file.read()
        assert (state.state, state.failed, state.left) == ("open", 0, 100)
        assert connection.llen(file.waiting_key(queue_name(ASLEEP, "bulk"))) == 100
        ended = Counter(
            json.loads(line)["custom_id"].split()[0] for line in file.results(file.read())
        )
        assert ended == {ALIAS: 100, OTHER: 100}

        taken: Counter[str] = Counter()
        while max(taken.values(), default=0) < 400:
            message = listener.get_message(timeout=5)
            taken[users[message["channel"].decode()]] += message["data"] == b"lpop"
        assert all(each.read().ok == 400 for each in batches)

    shares = [taken[each.run] / taken.total() for each in batches]
    assert min(shares) >= 0.45, f"while both waited, their shares were {shares}"
