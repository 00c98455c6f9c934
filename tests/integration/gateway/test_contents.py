"""Uploads are in Redis: every gateway has them, for a week."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from typing import Any

import httpx2
import pytest
from openai import APIStatusError, OpenAI
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError

from omlx_gateway.contents import write
from omlx_gateway.limits import Limits
from omlx_producer.wire.keys import KEEP_SECONDS
from tests.helpers.gateway import running_gateway
from tests.helpers.workers import ALIAS, wait_for

BODY = {"model": ALIAS, "prompt": "hello", "max_tokens": 4}
ROW = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
CONTENT = json.dumps(ROW).encode() + b"\n"


def upload(client: OpenAI, content: bytes) -> Any:
    return client.files.create(file=("rows.jsonl", content), purpose="batch")


@pytest.mark.usefixtures("worker")
def test_every_gateway_has_an_upload_after_the_one_that_took_it_is_gone(redis_url: str) -> None:
    # One row, of some chunks.
    content = CONTENT.replace(b" ", b" " * 300_000)
    with running_gateway(redis_url) as url, OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        file = upload(client, content)
        assert file.bytes == len(content)
    with running_gateway(redis_url) as url, OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")


def test_an_upload_expires_after_a_week_with_its_record(client: OpenAI, connection: Redis) -> None:
    file = upload(client, CONTENT)
    assert file.expires_at == file.created_at + KEEP_SECONDS
    for key in (f"omlx:file:{file.id}", f"omlx:file:{file.id}:content"):
        assert KEEP_SECONDS - 60 < connection.ttl(key) <= KEEP_SECONDS
    assert client.files.delete(file.id).deleted
    assert not connection.keys("omlx:file:*")


def test_an_empty_upload_is_a_file(client: OpenAI) -> None:
    assert client.files.content(upload(client, b"").id).content == b""


def test_what_a_killed_upload_left_expires_within_an_hour(connection: Redis) -> None:
    class Killed(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 2**21:
                raise KeyboardInterrupt
            return super().read(size)

    with pytest.raises(KeyboardInterrupt):
        write(connection, "file-x", Killed(bytes(2**23)))
    assert connection.llen("omlx:file:file-x:content") == 2
    assert 0 < connection.ttl("omlx:file:file-x:content") <= 3600


def test_an_upload_longer_than_redis_takes_is_a_413_and_leaves_nothing(
    redis_url: str, connection: Redis
) -> None:
    with (
        running_gateway(redis_url, Limits(file_bytes=1500)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(APIStatusError, match="longer than 1500 bytes") as refused:
            upload(client, bytes(2000))
        assert refused.value.status_code == 413
    assert not connection.keys("omlx:file*")


def test_a_full_disk_is_a_507_that_names_the_folder_and_leaves_nothing(
    client: OpenAI, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.SpooledTemporaryFile.write", fail)
    with pytest.raises(APIStatusError) as refused:
        upload(client, CONTENT)
    assert refused.value.status_code == 507
    told = f"{tempfile.gettempdir()}: cannot be written (No space left on device)"
    assert told in refused.value.message
    assert "TMPDIR" in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert connection.keys("omlx:file*") == []


def test_a_record_whose_answer_is_lost_leaves_no_file_without_its_content(
    client: OpenAI, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Pipeline.execute

    def losing(pipe: Pipeline, *given: Any) -> Any:
        recording = "HSET" in str(pipe.command_stack)
        answers = execute(pipe, *given)
        if recording:
            raise RedisConnectionError("the answer is lost")
        return answers

    monkeypatch.setattr(Pipeline, "execute", losing)
    with pytest.raises(APIStatusError, match="the answer is lost"):
        upload(client, CONTENT)
    assert [*connection.keys("omlx:file*"), *client.files.list().data] == []


def test_a_content_that_has_expired_is_a_404(
    client: OpenAI, gateway: str, connection: Redis
) -> None:
    file = upload(client, CONTENT)
    connection.delete(f"omlx:file:{file.id}:content")
    answer = httpx2.get(f"{gateway}/v1/files/{file.id}/content")
    assert answer.status_code == 404
    assert "has expired" in answer.json()["error"]["message"]
