"""A gateway that takes over a batch from one that died, or only slept, runs no row twice."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from omlx_gateway.batch_input import BatchInput
from omlx_gateway.contents import RedisContents
from omlx_gateway.files import FileStore
from omlx_gateway.intake import Intake
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.errors import UnknownJob
from tests.helpers.gateway import running_gateway
from tests.helpers.workers import ALIAS, running_worker, wait_for

ENDPOINT = "/v1/completions"
ROWS = 5


class Stuck:
    """A batch that no gateway can upload, for its file is elsewhere until `release`."""

    def __init__(self, gateway: str, connection: Redis, folder: Path) -> None:
        self.gateway = gateway
        self._connection = connection
        lines = b"".join(
            json.dumps({"custom_id": f"r{n}", "url": ENDPOINT, "body": body}).encode() + b"\n"
            for n in range(ROWS)
            if (body := {"model": ALIAS, "prompt": f"{n}", "max_tokens": 4})
        )
        sent = {"purpose": "batch"}
        answer = httpx2.post(f"{gateway}/v1/files", data=sent, files={"file": ("x", lines)})
        self._path = folder / answer.json()["id"]
        self._away = self._path.rename(folder.parent / "away")
        body = {"input_file_id": self._path.name, "endpoint": ENDPOINT, "completion_window": "1h"}
        self.id = httpx2.post(f"{gateway}/v1/batches", json=body).json()["id"]
        self._key = f"omlx:http_batch:{self.id}"

    def release(self) -> None:
        self._away.rename(self._path)

    def begun_by_another(self) -> Batch:
        """The batch that a gateway has begun, and not opened."""
        batch = Batch.create(self._connection)
        self._connection.hset(self._key, "batch", batch.id)
        return batch

    @contextlib.contextmanager
    def rows(self) -> Iterator[Iterator[Row | BadRow]]:
        record = {"completion_window": "1h", "endpoint": ENDPOINT}
        with (
            self._away.open("rb") as content,
            BatchInput(self._connection, content, record, iter).rows() as rows,
        ):
            yield rows

    def until(self, status: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            found: dict[str, Any] = httpx2.get(f"{self.gateway}/v1/batches/{self.id}").json()
            return found if found["status"] == status else None

        found: dict[str, Any] = wait_for(reached, what=status)
        return found

    @property
    def batch(self) -> str:
        return (self._connection.hget(self._key, "batch") or b"").decode()

    @property
    def claim_key(self) -> str:
        return f"{self._key}:claim"


@pytest.fixture
def stuck(redis_url: str, connection: Redis, tmp_path: Path) -> Iterator[Stuck]:
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:models"))
    with running_gateway(redis_url, files_dir=tmp_path / "files") as url:
        yield Stuck(url, connection, tmp_path / "files")


def opened(connection: Redis) -> list[str]:
    found = connection.zrange("omlx:batches", 0, -1)
    return [f"batch-{run.decode()}" for run in found]


def test_an_upload_that_slept_cannot_open_its_batch(
    stuck: Stuck, connection: Redis, redis_url: str
) -> None:
    mine = stuck.begun_by_another()

    def slow(rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        yield next(rows)
        stuck.release()
        stuck.until("in_progress")
        yield from rows

    with stuck.rows() as rows, pytest.raises(UnknownJob):
        mine.upload(slow(rows))
    assert stuck.batch != mine.id
    assert opened(connection) == [stuck.batch]
    with running_worker(redis_url):
        assert stuck.until("completed")["request_counts"]["completed"] == ROWS


def test_a_batch_that_was_opened_before_the_death_is_taken_as_it_is(
    stuck: Stuck, connection: Redis
) -> None:
    mine = stuck.begun_by_another()
    with stuck.rows() as rows:
        mine.upload(rows)
    stuck.release()
    assert stuck.until("in_progress")["request_counts"]["total"] == ROWS
    assert stuck.batch == mine.id
    assert opened(connection) == [mine.id]


def test_a_batch_that_another_gateway_uploads_is_left_to_it(
    stuck: Stuck, connection: Redis
) -> None:
    connection.set(stuck.claim_key, "another")
    stuck.release()
    time.sleep(1.2)
    assert stuck.batch == ""
    connection.delete(stuck.claim_key)
    stuck.until("in_progress")


def test_cancelling_during_an_upload_drops_it(stuck: Stuck, connection: Redis) -> None:
    mine = stuck.begun_by_another()

    def cancelled(rows: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        yield next(rows)
        answer = httpx2.post(f"{stuck.gateway}/v1/batches/{stuck.id}/cancel")
        assert answer.json()["status"] == "cancelled"
        yield from rows

    with stuck.rows() as rows, pytest.raises(UnknownJob):
        mine.upload(cancelled(rows))
    assert opened(connection) == []


def test_an_outage_is_told_once_not_at_every_look(caplog: pytest.LogCaptureFixture) -> None:
    with Redis(port=1, retry=None) as away:
        intake = Intake(away, FileStore(away, RedisContents(away)))
        for _ in range(3):
            intake.look()
    (told,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"Redis is unavailable \(.*localhost:1\..*\); waiting for it", told)
