"""Jobs whose outcome is known beforehand: what an undisturbed worker makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from uuid import uuid4

from redis import Redis

from omlx_producer import JobHandle, Producer
from omlx_producer.client.enqueue import job_id_of
from omlx_producer.wire import PRIORITIES, GenerationRequest, Priority
from tests.helpers.fake_engine import FakeEngine, expected
from tests.helpers.workers import ALIAS

FINAL = frozenset({"finished", "failed", "stopped", "canceled"})


@dataclass
class Accepted:
    """A job that Redis has acknowledged.

    Attributes:
        texts: by choice.
        streams: whether its tokens are published as they come.
        endings: the statuses that it may end in.
        again: submits it again, which changes nothing if Redis has it.
    """

    id: str
    texts: list[str]
    streams: bool
    endings: set[str] = field(default_factory=lambda: {"finished"})
    again: Callable[[Redis], object] | None = None


def submit(
    connection: Redis, prompt: str | None, *, priority: Priority = "default", **fields: Any
) -> Accepted:
    """Submit a job as producers do that may have to submit it again."""
    fields = {"model": ALIAS, "prompt": prompt, **fields}
    job = Accepted(*planned(key := uuid4().hex, priority, fields))
    job.again = partial(submit_once, key=key, priority=priority, fields=fields)
    job.again(connection)
    return job


def submit_once(
    connection: Redis, key: str, priority: Priority, fields: dict[str, Any]
) -> JobHandle:
    return Producer(connection).submit(
        fields, priority=priority, require_known_model=False, idempotency_key=key
    )


def planned(key: str, priority: Priority, fields: dict[str, Any]) -> tuple[str, list[str], bool]:
    """The id of the job with an idempotency key, its texts, and whether it publishes its tokens."""
    job_id, request, engine = job_id_of(key), GenerationRequest(**fields), FakeEngine()
    rows = engine.prepare(request, job_id)
    streams = priority != "bulk" if request.stream is None else request.stream
    return job_id, [expected(row)[1] for row in rows], streams


def submit_some(connection: Redis, random: Random, count: int) -> list[Accepted]:
    """A mixture: all priorities, one or two choices, seeded or not, short and long."""
    jobs: list[Accepted] = []
    for number in range(count):
        fields: dict[str, Any] = {"max_completion_tokens": random.randint(1, 60)}
        if random.random() < 0.5:
            fields["seed"] = random.randrange(2**31)
        if random.random() < 0.2:
            fields["n"] = 2
        if random.random() < 0.2:
            fields["stream"] = random.random() < 0.5
        prompt: str | None = f"prompt {number} " * random.randint(1, 4)
        if random.random() < 0.2:
            fields["messages"] = [{"role": "user", "content": f"prompt {number}"}]
            prompt = None
        jobs.append(submit(connection, prompt, priority=random.choice(PRIORITIES), **fields))
    return jobs
