"""Where Redis is, the clients that producers use, and whether jobs can be left with a server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

import redis
import redis.asyncio
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.backoff import ExponentialBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from omlx_producer.environment import DEFAULT_REDIS_URL, PREFIX, variable_set
from omlx_producer.errors import InvalidRequest, UnsuitableRedis

# The reasons of redis-py are left out: they may quote the part of the URL that is a password.
_NO_URL = "not the URL of a Redis server"
_REMEDY = f"give one such as {DEFAULT_REDIS_URL}"
_AROUND = "\"' \t\r\n"
# What can hold no password, even where it is misplaced.
_HARMLESS = re.compile(r"([A-Za-z+]+://)?[\w.-]*(:[0-9]*)?(/[\w.-]*)?")
_RAW_PASSWORD = (
    "has an @ behind a /, ? or #",
    "in a password write %40, %2F, %3F and %23 for them",
)
_SENTINEL = "Redis Sentinel is not supported", "give the URL of the master that it watches"
_UNKNOWN_OPTION = (
    "has an option behind its ? that redis-py does not know",
    "correct or remove it (Redis Sentinel is not supported)",
)

_VARIABLES = f"{PREFIX}REDIS_URL", "REDIS_URL"

CONNECT_SECONDS = 5.0
LONGEST_BLOCK_SECONDS = 4.0
# Every thread that waits for a result has a connection. redis-py's limit is 100; Redis's own is
# 10,000 clients.
_MAX_CONNECTIONS = 10_000
_BACKOFF = ExponentialBackoff(cap=0.5, base=0.05)
_RETRIES = 3
# Valkey began as this version, and still names it.
LEAST_VERSION = (7, 2)


class Settings(BaseSettings):
    """The variables that a producer reads. An empty one counts as unset."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore")

    omlx_queue_redis_url: str | None = None
    omlx_queue_allow_eviction: bool = False
    redis_url: str = DEFAULT_REDIS_URL


def read_settings(env_file: str | None = None) -> Settings:
    """The variables of the environment.

    Args:
        env_file: a file with more of them, for commands.

    Raises:
        InvalidRequest: names the variable whose value is wrong.
    """
    try:
        return Settings(_env_file=env_file)  # type: ignore[call-arg]
    except ValidationError as error:
        value = error.errors()[0]["input"]
        raise InvalidRequest(
            variable_set(f"{PREFIX}ALLOW_EVICTION", env_file=env_file),
            f"got {value!r:.60}",
            "give true or false",
        ) from None


def redis_url(given: str | None = None, env_file: str | None = None) -> str:
    """The URL given, else that of ``OMLX_QUEUE_REDIS_URL``, ``REDIS_URL``, or the default.

    Blanks and quotes around it do not count.
    """
    settings = read_settings(env_file)
    return _bare(given or settings.omlx_queue_redis_url or settings.redis_url)


def _bare(url: str) -> str:
    """A URL without blanks and quotes around it. What is nothing else stays, to be refused."""
    return (url.strip(_AROUND) or url) if isinstance(url, str) else url


def redis_variable(env_file: str | None = None) -> str | None:
    """The variable that says where Redis is, if no URL is given; None if the default does."""
    return variable_set(*_VARIABLES, env_file=env_file)


def without_password(url: str) -> str:
    """A Redis URL without its user, password and query, any of which may hold a secret.

    Where a password may reach into the other parts, they are left out too.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    if parts.scheme not in ("redis", "rediss", "unix") or _has_raw_password(parts):
        return "***"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _has_raw_password(parts: SplitResult) -> bool:
    """Whether an ``@`` comes after a /, ? or #, so that these may belong to a password."""
    options = parts.query.split("&")
    later = [option for option in options if not option.startswith(("username=", "password="))]
    # The path of a socket may hold an @.
    if parts.scheme != "unix" or (parts.netloc and "@" not in parts.netloc):
        later.append(parts.path)
    return any("@" in text for text in (*later, parts.fragment))


def connect(url: str, **options: Any) -> redis.Redis:
    """A client that fails within seconds when no server answers.

    Args:
        options: of redis-py; they replace the usual ones.

    Raises:
        InvalidRequest: if it is not the URL of a Redis server.
    """
    usual = {
        "max_connections": _MAX_CONNECTIONS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "retry": Retry(_BACKOFF, _RETRIES),
    }
    url = _bare(url)
    with _checked(url):
        client = redis.Redis.from_url(url, **(usual | options))
        _require_connectable(client)
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """The asyncio form of `connect`."""
    url = _bare(url)
    with _checked(url):
        client = redis.asyncio.Redis.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=redis.asyncio.retry.Retry(_BACKOFF, _RETRIES),
        )
        _require_connectable(client)
    return client


@contextlib.contextmanager
def _checked(url: str) -> Iterator[None]:
    if not isinstance(url, str):
        raise _not_taken(url)
    try:
        parts = urlsplit(url)
        if "sentinel" in parts.scheme:
            raise InvalidRequest("connection", *_SENTINEL)
        if _has_raw_password(parts):
            raise InvalidRequest("connection", *_RAW_PASSWORD)
        yield
        # redis-py uses database 0 for a path that is no number.
        if parts.scheme != "unix" and not re.fullmatch(r"/?|/[0-9]+/?", parts.path):
            got = f"got {parts.path[1:]!r} for the database"
            raise InvalidRequest("connection", got, f"give a number, as in {DEFAULT_REDIS_URL}")
    except InvalidRequest:
        raise
    except ValueError:
        harmless = len(url) <= 100 and _HARMLESS.fullmatch(url.strip(_AROUND))
        got = f"got {url!r}, " if harmless else ""
        raise InvalidRequest("connection", f"{got}{_NO_URL}", _REMEDY) from None
    except TypeError:
        raise InvalidRequest("connection", *_UNKNOWN_OPTION) from None


def _not_taken(given: object, beside: str = "") -> InvalidRequest:
    remedy = f"give a URL such as {DEFAULT_REDIS_URL}{beside}"
    return InvalidRequest("connection", f"got {type(given).__name__}", remedy)


def _require_connectable(client: redis.Redis | redis.asyncio.Redis) -> None:
    """Raise TypeError or ValueError for options that the first command would fail with."""
    options = client.get_connection_kwargs()
    # Refuses a host that is no valid name. UnicodeError is a ValueError.
    options.get("host", "").encode("idna")
    client.connection_pool.connection_class(**options)


def block_seconds(connection: redis.Redis | redis.asyncio.Redis) -> float:
    """How long a read may block; redis-py takes a longer silence for a lost connection."""
    socket_timeout = connection.get_connection_kwargs().get("socket_timeout")
    return min(LONGEST_BLOCK_SECONDS, (socket_timeout or float("inf")) / 2)


def require_client(
    connection: object, kind: type[redis.Redis | redis.asyncio.Redis] = redis.Redis
) -> None:
    """Refuse another object than a client, and one that decodes responses; RQ cannot work with it.

    Raises:
        InvalidRequest: with the remedy.
    """
    if not isinstance(connection, kind):
        package = kind.__module__.removesuffix(".client")
        raise _not_taken(connection, f", or a {package}.Redis")
    if connection.get_encoder().decode_responses:
        raise InvalidRequest("connection", "has decode_responses=True", "give a client without it")


def require_suitable(connection: redis.Redis, *, allow_eviction: bool | None) -> None:
    """Refuse a server that is too old, cannot hold jobs, or drops keys when its memory is full.

    Without a memory limit a server drops nothing, whatever its policy. One that does not answer
    INFO is trusted.

    Args:
        allow_eviction: accept one that drops keys; None for what the environment says.

    Raises:
        UnsuitableRedis: with the remedy.
    """
    if allow_eviction is None:
        allow_eviction = read_settings().omlx_queue_allow_eviction
    try:
        info: Any = connection.info()
    except ResponseError:
        return
    place = connection.get_connection_kwargs()
    server = "Redis at " + (place.get("path") or f"{place.get('host')}:{place.get('port')}")
    # Valkey has a name of its own for it.
    mode = info.get("redis_mode") or info.get("server_mode")
    policy = info.get("maxmemory_policy", "noeviction")
    version = str(info.get("redis_version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < LEAST_VERSION:
        raise UnsuitableRedis(
            f"{server} is of version {version}, and jobs need Redis 7.2 or newer, or Valkey; "
            "upgrade it, or give the URL of another one"
        )
    if mode == "sentinel":
        raise UnsuitableRedis(
            f"{server} is a Redis Sentinel, which holds no jobs; give the URL of the master that "
            "it watches"
        )
    if mode == "cluster":
        raise UnsuitableRedis(
            f"{server} is part of a Redis Cluster, and jobs need all keys on one server; give the "
            "URL of another one"
        )
    if policy != "noeviction" and info.get("maxmemory") != 0 and not allow_eviction:
        raise UnsuitableRedis(
            f"{server} drops keys when its memory is full (maxmemory-policy {policy}), so jobs get "
            "lost; run redis-cli CONFIG SET maxmemory-policy noeviction, or accept the loss with "
            "OMLX_QUEUE_ALLOW_EVICTION=true"
        )


def is_volatile(connection: redis.Redis) -> bool:
    """Whether a server keeps nothing on disk. One that does not tell is taken to keep all."""
    try:
        persistence: Any = connection.info("persistence")
        points: Any = connection.config_get("save")
    except ResponseError:
        return False
    return not persistence.get("aof_enabled", 1) and points.get("save") == ""


def server_time(connection: redis.Redis) -> float:
    """Seconds since 1970, on the server's clock."""
    seconds, micros = connection.time()
    return float(seconds) + float(micros) / 1e6
