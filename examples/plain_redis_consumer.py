"""Follow a job with redis-py alone, as a client in any language can.

Usage: plain_redis_consumer.py JOB_ID. Redis is where REDIS_URL says.
It subscribes first and reads the stream second. It drops what comes both ways, by token count.
"""

import json
import os
import sys
from collections.abc import Iterator
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
    for found in follow(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"), sys.argv[1]):
        print(json.dumps(found), flush=True)
