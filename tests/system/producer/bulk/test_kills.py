"""Kill -9 of clients, workers and Redis: after running again, one line for each row."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections import Counter
from pathlib import Path

import redis

from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.bulk_runs import (
    batch_line,
    count_lines,
    errors,
    ids,
    jobs_in_redis,
    lines,
    spawn,
    wait_for_model,
    write_jsonl,
    write_rows,
)
from tests.helpers.fake_engine import expected
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for, worker_process

ROWS, WINDOW, TOKENS = 500, 96, 12
RUN = ("run", "rows.jsonl", "-o", "out.jsonl", "--window", str(WINDOW))


def expected_texts() -> set[str]:
    texts = set()
    for number in range(ROWS):
        prompt = list(map(ord, f"prompt {number}"))
        texts.add(expected(RowRequest("", prompt, TOKENS, Sampling(seed=number)))[1])
    return texts


def test_500_rows_survive_the_killing_of_clients_a_worker_and_redis(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    # A seed for each row, so that its text says whether it is the right one.
    rows = [batch_line(f"r{n}", f"prompt {n}", max_tokens=TOKENS, seed=n) for n in range(ROWS)]
    write_jsonl(tmp_path / "rows.jsonl", rows)

    with redis_server("--appendonly", "yes") as server, contextlib.ExitStack() as stack:
        connection = stack.enter_context(redis.Redis.from_url(server.url))

        def start_worker() -> subprocess.Popen[bytes]:
            return stack.enter_context(
                worker_process(server.url, max_rows=8, step_seconds=0.008, lease_seconds=1.0)
            )

        def client_until(count: int) -> subprocess.Popen[str]:
            process = spawn(server.url, tmp_path, *RUN, "--progress", "none")
            stack.callback(process.kill)
            wait_for(lambda: count_lines(output) >= count, 40, f"{count} lines")
            return process

        workers = [start_worker(), start_worker()]
        wait_for_model(connection)

        client = client_until(50)
        assert jobs_in_redis(connection) <= WINDOW
        client.kill()
        client.communicate()

        client = client_until(120)
        workers[0].kill()
        start_worker()
        wait_for(lambda: count_lines(output) >= 200, 40, "rows after a worker's death")
        server.kill()
        server.start()
        wait_for(lambda: count_lines(output) >= 300, 40, "rows after the server's death")
        client.kill()
        client.communicate()

        # What a power cut may leave of the last line.
        with output.open("r+b") as stream:
            stream.truncate(output.stat().st_size - 25)
        torn = count_lines(output)
        assert torn < ROWS

        client = client_until(torn + 20)
        out, err = client.communicate(timeout=60)
        assert (client.returncode, out) == (0, ""), err
        assert jobs_in_redis(connection) == 0
        assert not list(connection.scan_iter("rq:queue:omlx:*"))

    assert Counter(ids(output)) == Counter(f"r{number}" for number in range(ROWS))
    assert errors(output) == []
    texts = {line["response"]["body"]["choices"][0]["text"] for line in lines(output)}
    assert texts == expected_texts()


def test_a_client_killed_again_and_again_at_any_moment_loses_and_doubles_nothing(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    write_rows(tmp_path / "rows.jsonl", 300)
    moments = random.Random(7)
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        for _ in range(6):
            client = spawn(redis_url, tmp_path, *RUN)
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(moments.uniform(0.4, 1.6))
            client.kill()
            client.communicate()
        client = spawn(redis_url, tmp_path, *RUN)
        _, err = client.communicate(timeout=60)
        assert client.returncode == 0, err
    assert Counter(ids(output)) == Counter(f"r{number}" for number in range(300))
    assert errors(output) == []
    assert jobs_in_redis(connection) == 0
