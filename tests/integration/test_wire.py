"""The commands of docs/wire.md do what the page says."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import redis

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from tests.helpers.workers import ALIAS, fetch, is_over, running_worker, wait_for

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
