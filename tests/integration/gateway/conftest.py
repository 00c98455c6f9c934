"""A gateway, a worker behind it, and OpenAI's client before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from redis import Redis

from tests.helpers.gateway import running_gateway
from tests.helpers.workers import running_worker, wait_for


@pytest.fixture
def gateway(redis_url: str) -> Iterator[str]:
    with running_gateway(redis_url) as url:
        yield url


@pytest.fixture
def client(gateway: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def worker(redis_url: str, connection: Redis) -> Iterator[None]:
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:models"))
        yield
