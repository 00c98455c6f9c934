"""What a Redis server says of itself: whether jobs can be left with it."""

from __future__ import annotations

import re
from typing import Any

import redis
from redis.exceptions import ResponseError

from omlx_producer.errors import UnsuitableRedis

# Valkey began as this version, and still names it.
LEAST_VERSION = (7, 2)


def require_suitable(connection: redis.Redis, *, allow_eviction: bool) -> None:
    """Refuse a server that is too old, cannot hold jobs, or drops keys when its memory is full.

    Without a memory limit a server drops nothing, whatever its policy. One that does not answer
    INFO is trusted.

    Raises:
        UnsuitableRedis: with the remedy.
    """
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
