"""How much a key may ask for: prompts a minute, and prompts that wait at the same time.

Both are counted in Redis, for all gateways together. Without keys, all requests are those of one.
"""

from __future__ import annotations

from collections.abc import Iterable

from rq.job import Job

from omlx_gateway.errors import ApiError
from omlx_gateway.gateway import Gateway
from omlx_gateway.keys import ApiKey
from omlx_producer.bulk.batch import KEEP_SECONDS

MINUTE = 60

# KEYS  a count
# ARGV  how many to count, the most, seconds
#
# Returns the seconds until the count begins anew if there would be more; else 0.
_COUNT = """
local count = tonumber(redis.call('GET', KEYS[1]) or 0) + ARGV[1]
if count > tonumber(ARGV[2]) then return math.max(1, redis.call('TTL', KEYS[1])) end
redis.call('SET', KEYS[1], 0, 'EX', ARGV[3], 'NX')
redis.call('INCRBY', KEYS[1], ARGV[1])
return 0
"""

# Looks at some of the jobs, at random, and forgets those that do not wait: each request adds fewer.
#
# KEYS  a set of jobs
# ARGV  prefix of job hashes
#
# Returns how many wait, about.
_WAITING = """
for _, job in ipairs(redis.call('SRANDMEMBER', KEYS[1], 20)) do
  if redis.call('HGET', ARGV[1] .. job, 'status') ~= 'queued' then
    redis.call('SREM', KEYS[1], job)
  end
end
return redis.call('SCARD', KEYS[1])
"""


async def require_rate(gateway: Gateway, key: ApiKey | None, count: int = 1) -> None:
    """Count prompts, or a request without one.

    Raises:
        ApiError: 429 if the key may not send so many in this minute.
    """
    if key is None or key.rate is None or count < 1:
        return
    script = gateway.redis.register_script(_COUNT)
    left = await script(keys=[f"omlx:http:rate:{key.name}"], args=[count, key.rate, MINUTE])
    if not left:
        return
    fits = count < key.rate
    raise ApiError(
        429,
        f"this API key may send {key.rate} prompts a minute; "
        + (f"try again in {left} s" if fits else "give fewer at once"),
        "rate_limit_error",
        "rate_limit_exceeded",
        headers={"Connection": "close"} | ({"Retry-After": str(left)} if fits else {}),
    )


async def require_room(gateway: Gateway, owner: str | None) -> None:
    """Refuse a request while too many prompts of its key wait.

    Raises:
        ApiError: 429.
    """
    script = gateway.redis.register_script(_WAITING)
    waiting = await script(keys=[_waiting_key(owner)], args=[Job.redis_job_namespace_prefix])
    require_fewer(gateway, waiting)


def require_fewer(gateway: Gateway, waiting: int) -> None:
    """Refuse a request while so many prompts of its key wait, or rows of its batches.

    Raises:
        ApiError: 429.
    """
    if waiting >= gateway.limits.queued:
        raise ApiError(
            429,
            f"{waiting} of your prompts wait, and this gateway takes more below "
            f"{gateway.limits.queued}; try again later",
            "rate_limit_error",
            "queue_full",
            headers={"Retry-After": "10"},
        )


async def note_waiting(gateway: Gateway, owner: str | None, jobs: Iterable[str]) -> None:
    """Count jobs that were just submitted, until they run."""
    pipe = gateway.redis.pipeline()
    pipe.sadd(_waiting_key(owner), *jobs)
    pipe.expire(_waiting_key(owner), KEEP_SECONDS)
    await pipe.execute()


def _waiting_key(owner: str | None) -> str:
    return f"omlx:http:waiting:{owner or ''}"
