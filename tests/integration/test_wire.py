"""The commands of docs/wire.md do what the page says."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.wire import WIRE_VERSION
from tests.helpers.image_parts import image
from tests.helpers.workers import ALIAS, enqueue, fetch, is_over, running_worker, status, wait_for

KEY = "omlx:batch:0123456789ab"
LATER = WIRE_VERSION + 1
PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
SUBMIT, READ, RESULT, CANCEL, BATCH, PROGRESS = re.findall(
    r"^```redis\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
)


def words(line: str) -> list[str]:
    """The words of a line as redis-cli reads them."""
    found = re.findall(r"""'([^']*)'|("(?:[^"\\]|\\.)*")|(\S+)""", line)
    return [json.loads(quoted) if quoted else single or bare for single, quoted, bare in found]


def type_lines(connection: redis.Redis, block: str) -> list[Any]:
    """Run the commands of a block for the tests' model."""
    lines = block.replace("demo", ALIAS).splitlines()
    return [connection.execute_command(*words(line)) for line in lines]


def test_a_job_by_hand_streams_and_has_a_result(redis_url: str, connection: redis.Redis) -> None:
    with running_worker(redis_url), Producer(connection) as producer:
        type_lines(connection, SUBMIT)
        text = producer.result("hello", timeout=20).text
        ((_, entries),) = type_lines(connection, READ)[0]
    events = [json.loads(fields[b"event"]) for _, fields in entries]
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert events[-1]["type"] == "done"
    status, ((_, fields),) = type_lines(connection, RESULT)
    assert status == b"finished"
    body = json.loads(base64.b64decode(fields[b"return_value"]))
    assert body["choices"][0]["text"] == text


def test_a_job_by_hand_is_cancelled_by_hand_while_it_runs(
    redis_url: str, connection: redis.Redis
) -> None:
    with running_worker(redis_url, step_seconds=0.01):
        type_lines(connection, SUBMIT.replace('tokens":8', 'tokens":9000'))
        wait_for(lambda: connection.exists("omlx:events:hello"))
        type_lines(connection, CANCEL)
        job = fetch(connection, "hello")
        wait_for(lambda: is_over(job))
        assert job.get_status().value == "stopped"


def test_a_batch_by_hand_ends_with_its_rows(redis_url: str, connection: redis.Redis) -> None:
    batch = Batch(connection, "batch-0123456789ab")
    with running_worker(redis_url):
        type_lines(connection, BATCH)
        wait_for(lambda: batch.read().over)
    assert (batch.read().rows, batch.read().ok) == (2, 2)
    figures, results = type_lines(connection, PROGRESS)
    assert figures == [b"done", b"2", b"0", b"2"]
    if isinstance(results, list):
        results = dict(zip(results[::2], results[1::2], strict=True))
    by_name = {name: json.loads(zlib.decompress(line)) for name, line in results.items()}
    assert [by_name[name]["custom_id"] for name in (b"1", b"2")] == ["a", "b"]
    assert by_name[b"1"]["response"]["status_code"] == 200


@pytest.mark.parametrize("newer", ["job", "batch"])
@pytest.mark.slow
def test_an_older_worker_leaves_newer_payloads_to_newer_ones(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    newer: str,
) -> None:
    run = "0123456789ab"
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:workers:fake"))
        if newer == "job":
            typed = SUBMIT.replace("status queued", f"omlx_wire {LATER} status queued")
            type_lines(connection, typed)
        else:
            type_lines(connection, BATCH.replace("state open", f"state open omlx_wire {LATER}"))
        for _ in range(2):
            behind = [enqueue(connection, priority=level) for level in ("default", "bulk")]
            wait_for(lambda jobs=behind: all(map(is_over, jobs)), what="the jobs behind it")
            assert {status(each) for each in behind} == {"finished"}
        waits = connection.llen("rq:queue:omlx:fake:default") if newer == "job" else 0
        waits += connection.llen(f"omlx:batch:{run}:waiting:omlx:fake:bulk")
        assert waits == (1 if newer == "job" else 2)
        told = [text for text in caplog.messages if "newer version of omlx-queue" in text]
        assert len(told) == 1
        monkeypatch.setattr("omlx_worker.queue.lease.WIRE_VERSION", LATER)
        with running_worker(redis_url):
            if newer == "job":
                wait_for(lambda: status(fetch(connection, "hello")) == "finished")
            else:
                wait_for(lambda: Batch(connection, f"batch-{run}").read().ok == 2)


def test_producers_write_the_version_that_a_job_needs(connection: redis.Redis) -> None:
    chat: Any = [{"role": "user", "content": [image()]}]
    for asked, version in (({"prompt": "x"}, b"1"), ({"messages": chat}, b"2")):
        with Producer(connection) as producer:
            job = producer.submit(model="demo", require_known_model=False, **asked)
        assert connection.hget(fetch(connection, job.id).key, "omlx_wire") == version
