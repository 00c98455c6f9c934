"""Follow a job with redis-py alone: subscribe, read the stream, drop what comes both ways.

Usage: plain_redis_consumer.py JOB_ID. Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says.
"""

import json
import sys
from collections.abc import Iterator
from os import getenv
from typing import Any

import redis
from redis.retry import Retry


def follow(url: str, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield every event of a job once, in order, up to the terminal one."""
    connection: Any = redis.Redis.from_url(url, retry=Retry(redis.backoff.ExponentialBackoff(), 10))
    last = (0, 0)
    with connection, connection.pubsub() as pubsub:
        pubsub.subscribe(f"omlx:tokens:{job_id}")
        for message in pubsub.listen():
            documents = [message["data"]]
            if message["type"] == "subscribe":  # also after a reconnect: read what was missed
                entries = connection.xrange(f"omlx:events:{job_id}", min=f"({last[0]}-{last[1]}")
                documents = [fields[b"event"] for _, fields in entries]
            for event in map(json.loads, documents):
                if (position := (event["n"], int(event["type"] != "tokens"))) > last:
                    last = position
                    yield event
            if last[1]:
                return


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("plain_redis_consumer.py: give the id of a job")
    url = getenv("OMLX_QUEUE_REDIS_URL") or getenv("REDIS_URL") or "redis://127.0.0.1:6379/0"
    for found in follow(url, sys.argv[1]):
        print(json.dumps(found), flush=True)
