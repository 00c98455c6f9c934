"""OpenAI's own client without a server, straight onto the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from redis import Redis

from omlx_gateway.openai import AsyncOpenAI, OpenAI
from tests.helpers.workers import ALIAS, running_worker, started, wait_for

CHAT: list[Any] = [{"role": "user", "content": "Reverse a list."}]


@pytest.fixture(autouse=True)
def _worker(redis_url: str, connection: Redis) -> Iterator[None]:
    with running_worker(redis_url, step_seconds=0.005):
        wait_for(lambda: connection.exists("omlx:models"))
        yield


def test_threads_share_a_client_whole_and_streamed(redis_url: str) -> None:
    threads = threading.active_count()
    with OpenAI(redis_url) as client, ThreadPoolExecutor(8) as pool:

        def whole(seed: int) -> str | None:
            answer = client.chat.completions.create(model=ALIAS, messages=CHAT, seed=seed)
            return answer.choices[0].message.content

        def streamed(seed: int) -> str:
            stream = client.chat.completions.create(
                model=ALIAS, messages=CHAT, seed=seed, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert list(pool.map(whole, range(16))) == list(pool.map(streamed, range(16)))
        assert [model.id for model in client.models.list()] == [ALIAS]
        with pytest.raises(openai.NotFoundError, match="no worker has announced"):
            client.chat.completions.create(model="nobody", messages=CHAT)
    wait_for(lambda: threading.active_count() <= threads)


async def test_many_tasks_stream_as_tokens_come(redis_url: str) -> None:
    tasks = asyncio.all_tasks()
    async with AsyncOpenAI(redis_url) as client:

        async def pieces(seed: int) -> int:
            stream = await client.completions.create(
                model=ALIAS, prompt="x", seed=seed, stream=True, max_tokens=30
            )
            return len([chunk async for chunk in stream])

        counts = await asyncio.gather(*map(pieces, range(12)))
        assert min(counts) > 1
    async with asyncio.timeout(10):
        while asyncio.all_tasks() != tasks:
            await asyncio.sleep(0.02)


async def test_leaving_a_stream_cancels_its_job(redis_url: str, connection: Redis) -> None:
    async with AsyncOpenAI(redis_url) as client:
        stream = await client.completions.create(
            model=ALIAS, prompt="x", stream=True, max_tokens=5000
        )
        async for _ in stream:
            break
        assert started(connection) == 1
        await stream.close()
        async with asyncio.timeout(10):
            while started(connection):
                await asyncio.sleep(0.02)
