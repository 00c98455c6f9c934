"""A gateway, a worker behind it, and OpenAI's client before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from redis import Redis

from tests.helpers.gateway import running_gateway
from tests.helpers.workers import running_worker, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the uploads of `gateway`, for tests that look at it. Else Redis has them."""
    return tmp_path / "files"


@pytest.fixture
def gateway(redis_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    with_folder = "folder" in request.fixturenames
    folder = request.getfixturevalue("folder") if with_folder else None
    with running_gateway(redis_url, files_dir=folder) as url:
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
