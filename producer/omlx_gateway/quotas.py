"""How much a key may ask for: prompts and rows a minute, and what waits at the same time.

Both are counted in Redis, for all gateways together. Without keys there is no rate, and the prompts
of all clients wait as those of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from omlx_gateway.errors import ApiError, log
from omlx_gateway.gateway import Gateway
from omlx_gateway.keys import ApiKey
from omlx_producer.complaints import cause
from omlx_producer.lua import source
from omlx_producer.terminal import counted
from omlx_producer.wire.keys import KEEP_SECONDS, prompts_key, rows_key

MINUTE = 60


async def require_rate(
    gateway: Gateway, key: ApiKey | None, count: int = 1, *, before: int = 0
) -> None:
    """Count prompts of a key in its minute. A request without a prompt counts as one.

    Args:
        before: prompts of the same request that are counted already.

    Raises:
        ApiError: 429 if the key may not send so many in this minute.
    """
    if key is None or key.rate is None or count < 1:
        return
    script = gateway.redis.register_script(source("count_prompts"))
    left = await script(args=[key.name, count, key.rate, MINUTE])
    if not left:
        return
    fits = before + count <= key.rate
    raise ApiError(
        429,
        f"this API key may send {counted(key.rate, 'prompt')} a minute; "
        + (f"try again in {left} s" if fits else "give fewer at once"),
        "rate_limit_error",
        "rate_limit_exceeded",
        headers={"Connection": "close"} | ({"Retry-After": str(left)} if fits else {}),
    )


def require_rows(connection: Redis, key: ApiKey | None, run: str, rows: int) -> None:
    """Take a batch of a key: its rows leave no room for another one until they fit the rate.

    Args:
        run: of the batch, which may ask again.

    Raises:
        ApiError: 429 while the rows of the last batch do not fit.
    """
    if key is None or key.rate is None:
        return
    name, seconds = rows_key(key.name), max(1, math.ceil(rows * MINUTE / key.rate))
    last: Any = connection.set(name, run, ex=seconds, nx=True, get=True)
    if last in (None, run.encode()):
        return
    left = max(1, connection.ttl(name))
    raise ApiError(
        429,
        f"this API key may send {counted(key.rate, 'row')} a minute, and its last batch has used "
        f"up the next {left} s; try again then",
        "rate_limit_error",
        "rate_limit_exceeded",
        headers={"Retry-After": str(left)},
    )


def give_back_rows(connection: Redis, key: ApiKey | None, run: str) -> None:
    """Let the next batch of a key come at once, since no row of this one runs."""
    if key is not None and connection.get(rows_key(key.name)) == run.encode():
        connection.delete(rows_key(key.name))


async def require_room(gateway: Gateway, owner: str | None) -> None:
    """Refuse a request while too many prompts of its key wait.

    Raises:
        ApiError: 429.
    """
    script = gateway.redis.register_script(source("prompts_waiting"))
    waiting = await script(args=[owner or "", gateway.limits.queued])
    require_fewer(gateway, waiting)


def require_fewer(gateway: Gateway, waiting: int) -> None:
    """Refuse a request of a key that has too many prompts and rows of batches waiting.

    Raises:
        ApiError: 429.
    """
    if waiting >= gateway.limits.queued:
        raise ApiError(
            429,
            f"{waiting} of your prompts wait, and no more than {gateway.limits.queued} may; "
            "try again later",
            "rate_limit_error",
            "queue_full",
            headers={"Retry-After": "10"},
        )


async def note_waiting(gateway: Gateway, owner: str | None, jobs: Iterable[str]) -> None:
    """Count jobs that were just submitted, until they run; if Redis cannot, it is logged."""
    pipe = gateway.redis.pipeline()
    pipe.sadd(prompts_key(owner or ""), *jobs)
    pipe.expire(prompts_key(owner or ""), KEEP_SECONDS)
    try:
        await pipe.execute()
    except RedisError as error:
        # An answer that says to try again would double the jobs.
        log.warning("prompts that wait are not counted: %s", cause(error))
