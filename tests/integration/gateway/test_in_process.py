"""OpenAI's own client without a server, straight onto the queue."""

from __future__ import annotations

import asyncio
import doctest
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from redis import Redis

from omlx_gateway import openai as openai_module
from omlx_gateway.openai import AsyncOpenAI, OpenAI
from omlx_producer import InvalidRequest
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import ALIAS, running_worker, started, wait_for

CHAT: list[Any] = [{"role": "user", "content": "Reverse a list."}]
ENDPOINT: Any = "/v1/completions"
WINDOW: Any = "24h"
LONG: Any = {"model": ALIAS, "prompt": "x", "stream": True, "max_tokens": 9000}
LONG["extra_body"] = {"ignore_eos": True}


def rows(count: int) -> bytes:
    lines = (
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": ALIAS, "prompt": "x", "max_tokens": 4},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture(autouse=True)
def _worker(redis_url: str, connection: Redis) -> Iterator[None]:
    with running_worker(redis_url, step_seconds=0.005):
        wait_for(lambda: connection.exists("omlx:models"))
        yield


def gateways() -> int:
    return sum(thread.name == "omlx-gateway" for thread in threading.enumerate())


@contextmanager
def nothing_left(redis_url: str, connection: Redis) -> Iterator[str]:
    """Check that a block leaves no thread, and no connection of the URL that it is given."""
    threads = threading.active_count()
    yield f"{redis_url}?client_name=own"
    names = [each["name"] for each in connection.client_list()]
    assert "own" not in names
    wait_for(lambda: threading.active_count() <= threads)


def test_threads_share_a_client_whole_and_streamed(redis_url: str, connection: Redis) -> None:
    def whole(seed: int) -> str | None:
        answer = client.chat.completions.create(model=ALIAS, messages=CHAT, seed=seed)
        return answer.choices[0].message.content

    def streamed(seed: int) -> str:
        stream = client.chat.completions.create(model=ALIAS, messages=CHAT, seed=seed, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with (
        nothing_left(redis_url, connection) as url,
        OpenAI(url) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        assert list(pool.map(whole, range(16))) == list(pool.map(streamed, range(16)))
        assert [model.id for model in client.models.list()] == [ALIAS]
        with pytest.raises(openai.NotFoundError, match="no worker has announced") as refused:
            client.chat.completions.create(model="nobody", messages=CHAT)
        # Python's other remedy is none here.
        assert "require_known_model" not in str(refused.value)


async def test_many_tasks_stream_as_tokens_come(redis_url: str) -> None:
    tasks = asyncio.all_tasks()
    async with AsyncOpenAI(redis_url) as client:

        async def pieces(seed: int) -> int:
            stream = await client.completions.create(
                model=ALIAS, prompt="x", seed=seed, stream=True, max_tokens=30
            )
            return len([chunk async for chunk in stream])

        assert min(await asyncio.gather(*map(pieces, range(12)))) > 1
        [model] = [model async for model in client.models.list()]
        assert model.id == ALIAS
    assert asyncio.all_tasks() == tasks
    assert gateways() == 0


def test_leaving_a_stream_cancels_its_job(redis_url: str, connection: Redis) -> None:
    with OpenAI(redis_url) as client:
        with client.completions.create(**LONG) as stream:
            next(iter(stream))
            assert started(connection) == 1
        wait_for(lambda: started(connection) == 0)


async def test_leaving_an_asynchronous_stream_cancels_its_job(
    redis_url: str, connection: Redis
) -> None:
    async with AsyncOpenAI(redis_url) as client:
        async with await client.completions.create(**LONG) as stream:
            await anext(aiter(stream))
            assert started(connection) == 1
        await asyncio.to_thread(wait_for, lambda: started(connection) == 0)


def test_a_client_is_closed_beside_open_streams(redis_url: str, connection: Redis) -> None:
    with nothing_left(redis_url, connection) as url, OpenAI(url) as client:
        streams = [iter(client.completions.create(**LONG)) for _ in range(3)]
        assert all(next(stream).choices for stream in streams)
    assert started(connection) == 0
    with pytest.raises(RuntimeError, match="closed"):
        client.models.list()


def test_a_batch_runs_to_its_output(redis_url: str, connection: Redis) -> None:
    with nothing_left(redis_url, connection) as url, OpenAI(url) as client:
        file = client.files.create(file=("in.jsonl", rows(3)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        output = client.batches.retrieve(batch.id).output_file_id or ""
        lines = client.files.content(output).text.splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == ["r0", "r1", "r2"]
        assert client.files.content(file.id).content == rows(3)
        assert client.files.delete(file.id).deleted


async def test_a_batch_that_was_made_last_is_in_the_queue_once_the_client_is_closed(
    redis_url: str, connection: Redis
) -> None:
    async with AsyncOpenAI(redis_url) as client:
        file = await client.files.create(file=("in.jsonl", rows(3)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW
        )
    assert connection.hget(f"omlx:http_batch:{batch.id}", "status") != b"validating"


def test_a_client_with_other_options_shares_the_gateway(redis_url: str) -> None:
    with OpenAI(redis_url) as client:
        hurried = client.with_options(timeout=0.2, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            hurried.completions.create(**(LONG | {"stream": False}))
        assert gateways() == 1
        assert [model.id for model in client.models.list()] == [ALIAS]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_client_that_is_dropped_takes_its_gateway_along(redis_url: str) -> None:
    client = OpenAI(redis_url)
    assert client.models.list().data
    del client
    gc.collect()
    wait_for(lambda: gateways() == 0)


FORGETFUL = """
import asyncio
from omlx_gateway.openai import AsyncOpenAI, OpenAI

client, other = OpenAI(), AsyncOpenAI()
client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
stream = client.completions.create(
    model="fake", prompt="x", stream=True, max_tokens=9000, extra_body={"ignore_eos": True}
)
next(iter(stream))
asyncio.run(other.models.retrieve("fake"))
# More than a socket takes, and nobody reads it.
file = client.files.create(file=("long", bytes(20_000_000)), purpose="batch")
unread = client.files.with_streaming_response.content(file.id).__enter__()
"""


def test_a_process_that_forgets_to_close_its_clients_ends(redis_url: str, tmp_path: Path) -> None:
    told = {"OMLX_QUEUE_REDIS_URL": redis_url, "TMPDIR": str(tmp_path)}
    told["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def test_a_wrong_url_is_told_at_once() -> None:
    with pytest.raises(InvalidRequest, match="not the URL of a Redis server"):
        OpenAI("http://127.0.0.1")
    assert gateways() == 0


def test_a_client_waits_for_a_redis_that_is_away(private_server: RedisServer) -> None:
    private_server.kill()
    with OpenAI(private_server.url, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="Redis is unavailable"):
            client.models.list()
        private_server.start()
        assert client.models.list().data == []


def test_the_examples_of_the_clients_are_true(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    told = doctest.testmod(openai_module, optionflags=doctest.ELLIPSIS)
    assert (told.failed, told.attempted) == (0, 3)
