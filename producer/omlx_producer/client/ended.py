"""The ends of jobs that are waited for.

Every submitter has a group. The script that ends a job adds the result to the stream of the job's
group, so any number of waits are served by one stream. A look at the job itself comes when a wait
begins, after a lost connection, and every `LOOK_SECONDS`: other tools end jobs without an entry,
and entries are kept for a minute only.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError, ResponseError
from rq.job import Job

from omlx_producer.client.outcome import (
    ENDINGS,
    Outcome,
    find_outcome,
    read_payload,
    results_key,
)
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import Reconnection
from omlx_producer.wire import GROUP_FIELD, ended_key

LOOK_SECONDS = 15.0
# Between looks at a job that belongs to no group.
ALONE_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class Wait:
    """The wait of one consumer for the end of a job.

    Attributes:
        inbox: gets None after the first look at a job that goes on, then an `Outcome` or an error;
            a queue, sync or async.
        group: the key of the stream that will tell of the end.
        since: milliseconds of the server's clock; earlier ends are of earlier runs.
        look_at: when to look at the job; monotonic seconds.
    """

    job_id: str
    inbox: Any
    group: bytes = b""
    since: int = 0
    look_at: float = 0.0
    told: bool = False

    def go_on(self) -> None:
        """Tell the consumer, once, that the job goes on, or that nobody can tell."""
        if not self.told:
            self.told = True
            self.inbox.put_nowait(None)


class Waits:
    """All waits of a reader, and how far it has read the streams of their groups."""

    def __init__(self) -> None:
        self._by_job: dict[str, list[Wait]] = {}
        # When to look at which; entries of waits that are over or were looked at are stale.
        self._looks: list[tuple[float, int, Wait]] = []
        self._order = itertools.count()
        # By the key of a group's stream: the id of the last entry read, and who waits for more.
        self._after: dict[bytes, bytes] = {}
        self._members: dict[bytes, set[Wait]] = {}
        self._outage = Reconnection()

    def __bool__(self) -> bool:
        return bool(self._by_job)

    def add(self, wait: Wait) -> None:
        self._by_job.setdefault(wait.job_id, []).append(wait)
        self._look_at(wait, 0.0)

    def drop(self, wait: Wait) -> None:
        """End a wait; it may have ended."""
        waits = self._by_job.get(wait.job_id, [])
        if wait in waits:
            waits.remove(wait)
        if not waits:
            self._by_job.pop(wait.job_id, None)
        members = self._members.get(wait.group, set())
        members.discard(wait)
        if not members:
            self._members.pop(wait.group, None)
            self._after.pop(wait.group, None)

    def due(self, most: int) -> list[Wait]:
        """Waits whose jobs are to be looked at now."""
        now, due = time.monotonic(), list[Wait]()
        while self._looks and self._looks[0][0] <= now and len(due) < most:
            look_at, _, wait = heapq.heappop(self._looks)
            if wait.look_at == look_at and self._holds(wait):
                due.append(wait)
        return due

    def until(self) -> float:
        """When the next look is due; monotonic seconds."""
        return self._looks[0][0] if self._looks else math.inf

    def ask(self, pipe: Any, due: Iterable[Wait]) -> None:
        """Queue the commands of a look."""
        pipe.time()
        for wait in due:
            pipe.hmget(Job.key_for(wait.job_id), "status", GROUP_FIELD)
            pipe.xrevrange(results_key(wait.job_id), count=1)

    def looked(self, due: Sequence[Wait], replies: Sequence[Any]) -> None:
        """Take the replies to `ask`."""
        seconds, microseconds = replies[0]
        self._outage.answered()
        for wait, fields, entries in zip(due, replies[1::2], replies[2::2], strict=True):
            if not self._holds(wait):
                continue
            status: Any = fields
            group = b""
            if not isinstance(fields, Exception):
                status, group = fields
            try:
                outcome = find_outcome(wait.job_id, status, entries)
            except (OmlxQueueError, ResponseError) as error:
                self._end(wait, error)
                continue
            if outcome is not None:
                self._end(wait, outcome)
                continue
            wait.since = 1000 * seconds + microseconds // 1000
            if group:
                self._join(wait, ended_key(group.decode(errors="replace")).encode())
            self._look_at(wait, time.monotonic() + (LOOK_SECONDS if group else ALONE_SECONDS))
            wait.go_on()

    def streams(self) -> dict[bytes, bytes]:
        """The streams to read, each with the id of the last entry read."""
        return self._after

    def heard(self, key: bytes, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Take entries of a stream."""
        for entry_id, fields in entries:
            self._after[key] = entry_id
            job_id = fields.get(b"job", b"").decode(errors="replace")
            for wait in list(self._by_job.get(job_id, ())):
                if wait.since and int(entry_id.partition(b"-")[0]) >= wait.since:
                    self._end(wait, _read(job_id, fields))

    def failed(self, error: Exception) -> float:
        """Look at all jobs again. Returns the seconds to wait first."""
        if not self._by_job:
            return 0.0
        try:
            pause = self._outage.failed(error)
        except RedisError as final:
            self.end_all(final)
            return 0.0
        for wait in self._all():
            self._look_at(wait, 0.0)
            wait.go_on()
        return pause

    def end_all(self, error: Exception) -> None:
        for wait in self._all():
            self._end(wait, error)

    def _all(self) -> list[Wait]:
        return list(itertools.chain.from_iterable(self._by_job.values()))

    def _holds(self, wait: Wait) -> bool:
        return wait in self._by_job.get(wait.job_id, ())

    def _join(self, wait: Wait, group: bytes) -> None:
        wait.group = group
        self._members.setdefault(group, set()).add(wait)
        self._after.setdefault(group, f"{wait.since - 1}-0".encode())

    def _look_at(self, wait: Wait, when: float) -> None:
        wait.look_at = when
        heapq.heappush(self._looks, (when, next(self._order), wait))

    def _end(self, wait: Wait, ending: Outcome | Exception) -> None:
        wait.inbox.put_nowait(ending)
        self.drop(wait)


def _read(job_id: str, fields: dict[bytes, bytes]) -> Outcome | Exception:
    status = fields.get(b"status", b"").decode(errors="replace")
    try:
        return read_payload(job_id, ENDINGS.get(status, "failed"), fields)
    except OmlxQueueError as error:
        return error
