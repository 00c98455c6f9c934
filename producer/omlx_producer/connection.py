"""Where Redis is, and the clients that producers use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import redis
import redis.asyncio
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from omlx_producer.environment import DEFAULT_REDIS_URL, DOTENV
from omlx_producer.errors import InvalidRequest

_NO_URL = f"not the URL of a Redis server; give one such as {DEFAULT_REDIS_URL}"
INVALID_URL = f"--redis-url: {_NO_URL}"
"""The reason of redis-py is left out: it may quote the part of the URL that is a password."""

CONNECT_SECONDS = 5.0
LONGEST_BLOCK_SECONDS = 4.0
# Every stream has a connection. redis-py's limit is 100; Redis's own is 10,000 clients.
_MAX_CONNECTIONS = 10_000
_BACKOFF = ExponentialBackoff(cap=0.5, base=0.05)
_RETRIES = 3


class Settings(BaseSettings):
    """The variables that a producer reads, also from ``.env``. An empty one counts as unset."""

    model_config = SettingsConfigDict(env_ignore_empty=True, env_file=DOTENV, extra="ignore")

    omlx_queue_redis_url: str | None = None
    redis_url: str = DEFAULT_REDIS_URL


def redis_url(given: str | None = None) -> str:
    """The URL given, else that of ``OMLX_QUEUE_REDIS_URL``, ``REDIS_URL``, or the default."""
    settings = Settings()
    return given or settings.omlx_queue_redis_url or settings.redis_url


def without_password(url: str) -> str:
    """A Redis URL without its user, password and query, any of which may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connect(url: str) -> redis.Redis:
    """A client that fails within seconds when no server answers.

    Raises:
        InvalidRequest: if it is not the URL of a Redis server.
    """
    with _checked_url():
        client = redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_SECONDS, retry=Retry(_BACKOFF, _RETRIES)
        )
        # A host that no name can be would raise only later. UnicodeError is a ValueError.
        client.get_connection_kwargs().get("host", "").encode("idna")
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """The asyncio form of `connect`."""
    with _checked_url():
        return redis.asyncio.Redis.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=redis.asyncio.retry.Retry(_BACKOFF, _RETRIES),
        )


@contextlib.contextmanager
def _checked_url() -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise InvalidRequest(f"connection: {_NO_URL}") from None


def block_seconds(connection: redis.Redis | redis.asyncio.Redis) -> float:
    """How long a read may block; redis-py takes a longer silence for a lost connection."""
    socket_timeout = connection.get_connection_kwargs().get("socket_timeout")
    return min(LONGEST_BLOCK_SECONDS, (socket_timeout or float("inf")) / 2)


def require_bytes(connection: redis.Redis | redis.asyncio.Redis) -> None:
    """Refuse a client that decodes responses; RQ cannot work with it.

    Raises:
        InvalidRequest: with the remedy.
    """
    if connection.get_encoder().decode_responses:
        raise InvalidRequest("connection: has decode_responses=True; give a client without it")
