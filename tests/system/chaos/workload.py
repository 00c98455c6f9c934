"""Jobs whose outcome is known beforehand: what an undisturbed worker makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from redis import Redis

from omlx_producer import Producer
from omlx_producer.protocol import PRIORITIES, GenerationRequest, Priority
from tests.helpers.fake_engine import FakeEngine, expected
from tests.helpers.workers import ALIAS, enqueue

FINAL = frozenset({"finished", "failed", "stopped", "canceled"})


@dataclass
class Accepted:
    """A job that Redis has acknowledged.

    Attributes:
        texts: by choice.
        streams: whether its tokens are published as they come.
        endings: the statuses that it may end in.
        after: the jobs that it waits for.
    """

    id: str
    texts: list[str]
    streams: bool
    endings: set[str] = field(default_factory=lambda: {"finished"})
    after: tuple[str, ...] = ()


def submit(
    connection: Redis, prompt: str, *, priority: Priority = "default", **fields: Any
) -> Accepted:
    """Submit a job as producers do."""
    fields = {"model": ALIAS, "prompt": prompt, **fields}
    handle = Producer(connection).submit(fields, priority=priority, require_known_model=False)
    return accepted(handle.id, GenerationRequest(**fields), priority)


def submit_after(connection: Redis, first: Accepted, prompt: str) -> Accepted:
    """A job that depends on another: the first one must then be ended by RQ's own handlers."""
    job = enqueue(connection, prompt, depends_on=first.id, result_ttl=3600, failure_ttl=3600)
    waiting = accepted(job.id, GenerationRequest(model=ALIAS, prompt=prompt), "default")
    waiting.after = (first.id,)
    return waiting


def accepted(job_id: str, request: GenerationRequest, priority: Priority) -> Accepted:
    rows = FakeEngine().prepare(request, job_id)
    streams = priority != "bulk" if request.stream is None else request.stream
    return Accepted(job_id, [expected(row)[1] for row in rows], streams)


def submit_some(connection: Redis, random: Random, count: int) -> list[Accepted]:
    """A mixture: all priorities, one or two choices, seeded or not, short and long, dependents."""
    jobs: list[Accepted] = []
    for number in range(count):
        if jobs and random.random() < 0.15:
            jobs.append(submit_after(connection, random.choice(jobs), f"after {number}"))
            continue
        fields: dict[str, Any] = {"max_completion_tokens": random.randint(1, 60)}
        if random.random() < 0.5:
            fields["seed"] = random.randrange(2**31)
        if random.random() < 0.2:
            fields["n"] = 2
        if random.random() < 0.2:
            fields["stream"] = random.random() < 0.5
        prompt = f"prompt {number} " * random.randint(1, 4)
        jobs.append(submit(connection, prompt, priority=random.choice(PRIORITIES), **fields))
    return jobs
