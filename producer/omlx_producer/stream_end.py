"""The end of a job's stream: how far it has come, and what is written when the job is over."""

from __future__ import annotations

import redis
from redis.client import Pipeline

from omlx_producer.protocol import (
    ENDED_SECONDS,
    TerminalEvent,
    ended_stream,
    events_key,
    tokens_channel,
)


def read_stream_end(connection: redis.Redis, job_id: str) -> tuple[int, bool]:
    """How many tokens the stream of a job holds, and whether it is over: the id of its last entry
    says both."""
    last: list[tuple[bytes, dict[bytes, bytes]]] = connection.xrevrange(  # type: ignore[assignment]
        events_key(job_id), count=1
    )
    if not last:
        return 0, False
    tokens, _, part = last[0][0].partition(b"-")
    return int(tokens), part != b"0"


def write_stream_end(pipeline: Pipeline, event: TerminalEvent, *, keep_for: int) -> None:
    """Queue what tells everybody that a job is over: its consumers, and the bulk run it is of.

    Args:
        keep_for: seconds for which its stream can still be read.
    """
    key, payload = events_key(event.job_id), event.model_dump_json()
    pipeline.xadd(key, {"event": payload}, id=event.stream_id)
    pipeline.publish(tokens_channel(event.job_id), payload)
    if stream := ended_stream(event.job_id):
        pipeline.xadd(stream, {"job": event.job_id})
        pipeline.expire(stream, ENDED_SECONDS)
    pipeline.expire(key, keep_for)
