"""What must hold after any disturbance. Each check returns one sentence for each violation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
)

from omlx_producer.wire import PRIORITIES, events_key, parse_event, queue_name
from tests.helpers.workers import ALIAS, fetch, rq_info
from tests.system.chaos.workload import FINAL, Accepted

Check = Callable[[Redis, Sequence[Accepted]], list[str]]

MODELS = (ALIAS, "second", "third")
QUEUES = [queue_name(model, priority) for model in MODELS for priority in PRIORITIES]
REGISTRIES = {
    "finished": FinishedJobRegistry,
    "failed": FailedJobRegistry,
    "canceled": CanceledJobRegistry,
}
# Where a job of this status is; a stopped one is kept with those that failed.
PLACES = {"queued": "queue", "started": "wip", "stopped": "failed"}
# What `rq info` counts for a queue, by place.
FIGURES = ("queue", "wip", "finished", "failed")
# What stays: RQ's lists of queues and workers, registries, the models, lists of files.
PERMANENT = re.compile(
    r"rq:queues|rq:workers(:.*)?|rq:(finished|failed|canceled):.*|omlx:models|chaos:.*"
    r"|omlx:http:(files|batches|waiting:.*)|omlx:expiring"
)


def status_of(connection: Redis, job_id: str) -> str:
    found = connection.hget(f"rq:job:{job_id}", "status")
    return found.decode() if found else "missing"


def places(connection: Redis) -> dict[str, Counter[str]]:
    """Where each job id is, and how often."""
    found: dict[str, Counter[str]] = {}

    def add(job: bytes, place: str) -> None:
        found.setdefault(job.decode().partition(":")[0], Counter())[place] += 1

    for queue in QUEUES:
        for job in connection.lrange(f"rq:queue:{queue}", 0, -1):
            add(job, "queue")
        for entry in connection.zrange(f"rq:wip:{queue}", 0, -1):
            add(entry, "wip")
        for place, registry in REGISTRIES.items():
            for job in connection.zrange(registry(queue, connection=connection).key, 0, -1):
                add(job, place)
    return found


def each_job_is_in_one_place(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    """The place that its status names, at any moment at which nobody works."""
    found = places(connection)
    problems = []
    for job in jobs:
        status = status_of(connection, job.id)
        place = PLACES.get(status, status)
        here = dict(found.get(job.id, {}))
        if here != {place: 1}:
            problems.append(f"job {job.id} is {status} and in {here or 'no place'}")
    return problems


def each_job_ends_once(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    problems = each_job_is_in_one_place(connection, jobs)
    for job in jobs:
        status = status_of(connection, job.id)
        if status not in job.endings:
            problems.append(f"job {job.id} ended {status}, not {' or '.join(sorted(job.endings))}")
    return problems


def each_job_has_one_result(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    counts = {job.id: connection.xlen(f"rq:results:{job.id}") for job in jobs}
    return [f"job {job} has {count} results" for job, count in counts.items() if count != 1]


def texts_are_those_of_an_undisturbed_run(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    problems = []
    for job in jobs:
        if status_of(connection, job.id) != "finished":
            continue
        body = fetch(connection, job.id).return_value()
        texts = [text_of(choice) for choice in body["choices"]] if body else None
        if texts != job.texts:
            problems.append(f"job {job.id} has the texts {texts}, not {job.texts}")
    return problems


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of a completion, or of a chat."""
    found = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(found)


def streams_are_whole(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    """Without gaps, in order, with one end, and equal to the result."""
    return [
        f"the stream of job {job.id}: {problem}"
        for job in jobs
        for problem in _stream_problems(connection, job)
    ]


def _stream_problems(connection: Redis, job: Accepted) -> list[str]:
    entries = connection.xrange(events_key(job.id))
    events = [parse_event(fields[b"event"]) for _, fields in entries]
    if not events:
        return ["is empty"]
    problems, position = [], 0
    texts = [""] * len(job.texts)
    for event in events[:-1]:
        if event.type != "tokens":
            problems.append(f"ends with {event.type} before its end")
            continue
        if event.since != position:
            problems.append(f"goes on at {event.since} after {position}")
        position = event.n
        for delta in event.choices:
            texts[delta.index] += delta.text
    status = status_of(connection, job.id)
    ends = {"finished": "done", "failed": "failed"}.get(status, "cancelled")
    if events[-1].type != ends:
        problems.append(f"ends with {events[-1].type}, and the job is {status}")
    if status == "finished" and (job.streams or any(texts)) and texts != job.texts:
        ids = [entry.decode() for entry, _ in entries]
        problems.append(f"has the texts {texts}, not {job.texts}, in the entries {ids}")
    if any(not whole.startswith(text) for text, whole in zip(texts, job.texts, strict=True)):
        problems.append(f"has the texts {texts}, which do not begin {job.texts}")
    return problems


def nothing_is_held(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    """No lease, execution, or waiting entry is left."""
    # At one moment: between two calls a job may go from a place not asked yet to one asked already.
    pipe = connection.pipeline()
    pipe.keys("rq:execution*")
    for queue in QUEUES:
        pipe.keys(f"rq:wip:{queue}")
        pipe.keys(f"rq:queue:{queue}")
    return [f"{key.decode()} is left behind" for keys in pipe.execute() for key in keys]


def every_key_expires_or_has_an_owner(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    problems = [
        f"{key.decode()} never expires"
        for key in connection.scan_iter()
        if connection.ttl(key) == -1 and not PERMANENT.fullmatch(key.decode())
    ]
    for queue in QUEUES:
        for place in ("finished", "failed", "canceled"):
            registry = REGISTRIES[place](queue, connection=connection)
            problems += [
                f"{registry.key} names {job.decode()}, which is gone"
                for job in connection.zrange(registry.key, 0, -1)
                if not connection.exists(f"rq:job:{job.decode()}")
            ]
    return problems


def rq_info_tells_the_truth(connection: Redis, jobs: Sequence[Accepted]) -> list[str]:
    told: Counter[str] = Counter()
    url = "redis://{host}:{port}/{db}".format(**connection.get_connection_kwargs())
    for line in rq_info(url).splitlines():
        if found := re.match(
            r"queue omlx:.* (\d+), (\d+) executing, (\d+) finished, (\d+) failed", line
        ):
            told.update(dict(zip(FIGURES, map(int, found.groups()), strict=True)))
    true: Counter[str] = Counter()
    # Also the jobs of bulk rows that a client deleted, and that the server has brought back.
    for key in connection.scan_iter("rq:job:*", _type="hash"):
        status = status_of(connection, key.decode().removeprefix("rq:job:"))
        true[PLACES.get(status, status)] += 1
    return [
        f"rq info says {told[place]} {place}; it is {true[place]}"
        for place in FIGURES
        if told[place] != true[place]
    ]


# While nobody works, whatever was left half done.
AT_REST: tuple[Check, ...] = (each_job_is_in_one_place, rq_info_tells_the_truth)
AT_THE_END: tuple[Check, ...] = (
    each_job_ends_once,
    each_job_has_one_result,
    texts_are_those_of_an_undisturbed_run,
    streams_are_whole,
    nothing_is_held,
    every_key_expires_or_has_an_owner,
    rq_info_tells_the_truth,
)


def violations(connection: Redis, jobs: Sequence[Accepted], checks: Sequence[Check]) -> list[str]:
    return [
        f"{check.__name__}: {problem}" for check in checks for problem in check(connection, jobs)
    ]


def are_over(connection: Redis, jobs: Sequence[Accepted]) -> bool:
    return all(status_of(connection, job.id) in FINAL for job in jobs)
