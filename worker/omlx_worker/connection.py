"""The worker's connection to Redis: its own server or another, checked before jobs come."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from omlx_producer import connection
from omlx_producer.complaints import redis_error, settings_error
from omlx_producer.connection import is_volatile, require_suitable
from omlx_producer.environment import DOTENV
from omlx_producer.errors import InvalidRequest, UnsuitableRedis
from omlx_producer.outage import passes
from omlx_producer.program import INVALID, UNREACHABLE, fail
from omlx_worker.options import source_of
from omlx_worker.queue import embedded
from omlx_worker.queue.unfit import unfit
from omlx_worker.settings import WorkerSettings

_ELSEWHERE = "name another with --redis-url, or pass --embedded-redis"

log = logging.getLogger("omlx_worker")


@contextmanager
def server_url(settings: WorkerSettings, given: Container[str]) -> Iterator[str]:
    """The URL of the server that the settings name; an embedded one runs meanwhile.

    Args:
        given: the fields from the command line.
    """
    if not settings.embedded_redis:
        if "redis_dir" in given:
            fail(INVALID, f"{source_of('redis_dir')} is for --embedded-redis; add that")
        yield connection.redis_url(settings.redis_url, DOTENV)
        return
    if "redis_url" in given:
        fail(INVALID, f"{source_of('embedded_redis')} runs its own server; leave --redis-url out")
    with embedded_server(settings) as server:
        log.info("Redis is at %s", server.url)
        if server.port != embedded.USUAL_PORT:
            taken = "port %d is taken: pass --redis-url %s to clients"
            log.warning(taken, embedded.USUAL_PORT, server.url)
        yield server.url


@contextmanager
def embedded_server(settings: WorkerSettings) -> Iterator[embedded.EmbeddedRedis]:
    """The embedded server, which runs meanwhile. If it cannot, the program ends with a sentence."""
    try:
        server = embedded.start_at_preferred_port(settings.redis_dir)
    except embedded.ServerError as error:
        fail(UNREACHABLE, str(error))
    try:
        yield server
    finally:
        server.stop()


def connect(url: str) -> Redis:
    """A client for a worker. It gives a call up after 30 s, three times 10.

    Raises:
        InvalidRequest: if it is not the URL of a Redis server.
    """
    network = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return connection.connect(
        url,
        **network,
        socket_timeout=10.0,
        socket_connect_timeout=5.0,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2),
    )


def reach(url: str, *, allow_eviction: bool) -> Redis:
    """Connect to a server that can hold jobs, or end the program with a sentence."""
    try:
        client = connect(url)
        client.ping()
        require_suitable(client, allow_eviction=allow_eviction)
        if is_volatile(client):
            log.warning(
                "Redis keeps nothing on disk, so its restart loses all jobs; turn that on with: "
                "redis-cli CONFIG SET appendonly yes"
            )
    except InvalidRequest as error:
        fail(INVALID, settings_error(error))
    except UnsuitableRedis as error:
        fail(UNREACHABLE, str(error))
    except RedisError as error:
        fail(UNREACHABLE, redis_error(error, url, _ELSEWHERE))
    return client


def unusable(url: str, error: Exception) -> str | None:
    """The sentence for a server that is away or cannot hold jobs; None for any other error."""
    problem = unfit(error) or error
    return redis_error(problem, url, _ELSEWHERE) if passes(problem) else None
