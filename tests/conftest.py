"""Fixtures shared by all tests. No test touches a server that it did not start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def _session_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis_url(_session_server: RedisServer) -> str:
    """The URL of the session's server, empty at the start of the test."""
    with redis.Redis.from_url(_session_server.url) as client:
        client.flushall()
    return _session_server.url


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the session's server, as RQ wants it: it returns bytes."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def private_server() -> Iterator[RedisServer]:
    """A server of the test's own, which it may stop, kill, pause and start again."""
    with redis_server() as server:
        yield server
