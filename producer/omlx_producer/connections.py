"""Clients of Redis as producers need them."""

from __future__ import annotations

import redis
import redis.asyncio
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

CONNECT_SECONDS = 5.0


def connect(url: str) -> redis.Redis:
    """A client that fails within seconds when no server answers.

    Raises:
        ValueError: if the URL is not one of Redis.
    """
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=3),
    )


def connect_async(url: str) -> redis.asyncio.Redis:
    """The same for asyncio."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=redis.asyncio.retry.Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=3),
    )


def require_bytes(connection: redis.Redis | redis.asyncio.Redis) -> None:
    """Refuse a client that decodes responses, with which RQ cannot work.

    Raises:
        ValueError: with the remedy.
    """
    if connection.get_encoder().decode_responses:
        raise ValueError("the Redis client has decode_responses=True; create one without it")
