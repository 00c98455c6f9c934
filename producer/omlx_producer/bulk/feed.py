"""Keeps the window of a run full: enqueues rows, collects their results, deletes their jobs.

A row is in Redis from before its job is enqueued until after its result is durable in the sink.
Running the row again at any time in between finds the job or makes it.

One stream per run names the jobs that have ended. An entry is only a hint to look at that job.
Every `RECONCILE_SECONDS`, and after each outage, all rows of the window are looked at: a server may
lose data in a restart so short that redis-py hides it, and other tools end jobs without an entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from omlx_producer.bulk.jobs import (
    EndedStream,
    delete_jobs,
    job_id_of,
    read_endings,
    read_origins,
    read_statuses,
    withdraw,
)
from omlx_producer.bulk.row import BadRow, Row, RowResult
from omlx_producer.bulk.window import DEFAULT_WINDOW, InFlight, Window
from omlx_producer.enqueue import JOB_SECONDS, Limits, enqueue
from omlx_producer.outcome import ENDINGS
from omlx_producer.protocol import ENDED_SECONDS, Priority, queue_name

# A MULTI of this many jobs delays other clients by about half a millisecond.
ENTER = 100
LOOK = 200
# Results, or seconds, per write to the disk.
GROUP = 256
GROUP_SECONDS = 0.25
RECONCILE_SECONDS = 30.0
WITHDRAW_SECONDS = 0.5
MAX_LOSSES = 3


class Sink(Protocol):
    """Where results go, and what says which rows are done."""

    def commit(self, results: Sequence[RowResult]) -> None:
        """Make results durable; their jobs stay in Redis until this returns.

        A commit that was cut off may be repeated. It must count each result once.
        """


class Feed:
    """Takes the rows of a run through Redis.

    Args:
        run: the id of the run, part of the ids of its jobs.
        rows: the rows to run, each once.
        on_results: called with results that are durable.
        rerun_failures: run a row again if Redis holds its failed job of an earlier run.
    """

    def __init__(
        self,
        connection: redis.Redis,
        run: str,
        rows: Iterable[Row | BadRow],
        sink: Sink,
        *,
        window: int | None = DEFAULT_WINDOW,
        priority: Priority = "bulk",
        job_timeout: int = JOB_SECONDS,
        on_results: Callable[[list[RowResult]], None] = lambda _: None,
        rerun_failures: bool = False,
    ) -> None:
        self._connection = connection
        self._run = run
        self._rows: Iterator[Row | BadRow] = iter(rows)
        self._sink = sink
        self._priority: Priority = priority
        # Results outlive a client that is away for a week. The window bounds their number.
        self._limits = Limits(job_timeout, ENDED_SECONDS, ENDED_SECONDS)
        self._on_results = on_results
        self._ended = EndedStream(connection, run)
        self._window = Window(window, rerun=rerun_failures)
        self._settled: list[RowResult] = []
        self._settled_at = 0.0
        self._durable: list[RowResult] = []
        self._exhausted = False
        self._stopping = False
        self._reconciled_at = time.monotonic()
        self._withdrawn_at = float("-inf")
        self._queue: Callable[[str], Queue] = cache(
            lambda name: Queue(name, connection=connection, serializer=JSONSerializer)
        )

    @property
    def in_flight(self) -> int:
        """Rows in Redis that have no result here yet."""
        return len(self._window)

    @property
    def job_ids(self) -> list[str]:
        """The jobs of the rows in flight."""
        return [flight.job_id for flight in self._window]

    @property
    def exhausted(self) -> bool:
        """Whether all rows have entered."""
        return self._exhausted

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return not self._exhausted or bool(self._window or self._settled or self._durable)

    def turn(self, wait: float) -> None:
        """Do what is due.

        Args:
            wait: seconds to wait for rows to end, at most.

        Raises:
            redis.exceptions.RedisError: nothing is lost; call `recover` and try again.
            OSError: if the sink cannot be written.
        """
        self._delete_durable()
        self._enter()
        if self._stopping:
            self._withdraw()
        self._collect(wait)
        if time.monotonic() - self._reconciled_at > RECONCILE_SECONDS:
            self._reconcile()
        if self._commit_is_due():
            self._commit()

    def recover(self) -> None:
        """Look at everything again: Redis was away and may have lost data."""
        self._ended.rewind()
        self._reconciled_at = float("-inf")

    def stop(self) -> None:
        """Withdraw the rows that wait. The feed is done when those that run are over."""
        self._rows = iter(())
        self._exhausted = self._stopping = True

    def abandon(self) -> None:
        """Take the rows that wait, and those that have ended, out of Redis. No more turns follow.

        Raises:
            redis.exceptions.RedisError: if Redis does not answer; what is left expires.
        """
        self._withdraw()
        self._delete([(r.job_id, r.row) for r in self._settled if isinstance(r.row, Row)])

    def sweep(self) -> None:
        """Delete the jobs that earlier runs left behind, of rows that are done, edited or removed.

        Call only at the end of all rows.
        """
        while self._ended.read(None):
            pass
        strays = list(self._ended.entries)
        origins = read_origins(self._connection, strays)
        with self._connection.pipeline(transaction=False) as pipe:
            delete_jobs(pipe, origins)
            self._ended.delete(pipe, strays)
            pipe.execute()
        self._ended.forget(strays)
        self._ended.drop_if_empty()

    # Entering

    @property
    def _room(self) -> int:
        return 0 if self._exhausted else self._window.room(len(self._settled))

    def _enter(self) -> None:
        """Enqueue up to `ENTER` rows. Bad rows are settled and take no room in Redis."""
        flights = []
        for _ in range(ENTER):
            if not self._room:
                break
            row = next(self._rows, None)
            if row is None:
                self._exhausted = True
            elif isinstance(row, BadRow):
                self._settle(RowResult.of_bad(row))
            else:
                flights.append(self._window.join(job_id_of(self._run, row), row))
        if not flights:
            return
        self._adopt(flights)
        self._enqueue([flight for flight in flights if not flight.enqueued])

    def _adopt(self, flights: list[InFlight]) -> None:
        """Find the jobs of these rows from an earlier run, and their results."""
        statuses = read_statuses(self._connection, [flight.job_id for flight in flights])
        ended = []
        for flight, status in zip(flights, statuses, strict=True):
            flight.enqueued = status is not None
            if status in ENDINGS:
                ended.append(flight.job_id)
            elif status is not None:
                flight.rerun = False
        self._look_at(ended)

    def _enqueue(self, flights: list[InFlight]) -> None:
        for start in range(0, len(flights), ENTER):
            chunk = flights[start : start + ENTER]
            jobs = [flight.as_job(self._priority) for flight in chunk]
            enqueue(self._connection, jobs, self._limits, self._queue)
            for flight in chunk:
                flight.enqueued, flight.rerun = True, False

    # Collecting

    def _collect(self, wait: float) -> None:
        """Read the stream; wait only if there is nothing else to do."""
        if self._settled:
            wait = min(wait, GROUP_SECONDS)
        idle = self._window and not self._room
        ended = self._ended.read(wait if idle else None)
        self._look_at([job_id for job_id in ended if job_id in self._window])

    def _look_at(self, job_ids: list[str]) -> None:
        """Settle the rows of ended jobs; enqueue again the rows whose jobs are gone."""
        again: list[InFlight] = []
        for job_id, outcome in read_endings(self._connection, job_ids).items():
            flight = self._window[job_id]
            if outcome is None:
                flight.losses += flight.enqueued
            if flight.losses > MAX_LOSSES:
                reason = f"Redis lost the row {flight.losses} times"
                self._settle(RowResult(flight.row, job_id, code="lost", reason=reason))
            elif outcome is None or (flight.rerun and outcome.ending != "finished"):
                again.append(flight)
            else:
                self._settle(RowResult.of_job(flight.row, outcome))
        if again:
            for flight in again:
                flight.enqueued = False
            self._delete([(flight.job_id, flight.row) for flight in again])
            self._enqueue(again)

    def _reconcile(self) -> None:
        """Look at every row of the window."""
        ids = [flight.job_id for flight in self._window]
        for start in range(0, len(ids), LOOK):
            chunk = ids[start : start + LOOK]
            statuses = zip(chunk, read_statuses(self._connection, chunk), strict=True)
            self._look_at([job for job, status in statuses if status is None or status in ENDINGS])
        self._reconciled_at = time.monotonic()

    def _withdraw(self) -> None:
        if time.monotonic() - self._withdrawn_at < WITHDRAW_SECONDS:
            return
        by_queue = self._by_queue((flight.job_id, flight.row) for flight in self._window)
        for queue, job_ids in by_queue.items():
            for job_id in withdraw(self._connection, queue, job_ids):
                self._window.leave(job_id)
        self._withdrawn_at = time.monotonic()

    # Committing

    def _settle(self, result: RowResult) -> None:
        if not self._settled:
            self._settled_at = time.monotonic()
        if result.job_id:
            self._window.leave(result.job_id)
        self._settled.append(result)

    def _commit_is_due(self) -> bool:
        if not self._settled:
            return False
        late = time.monotonic() - self._settled_at >= GROUP_SECONDS
        return late or len(self._settled) >= GROUP or not self._window

    def _commit(self) -> None:
        self._sink.commit(self._settled)
        self._durable, self._settled = self._settled, []
        self._on_results(self._durable)
        self._delete_durable()

    def _delete_durable(self) -> None:
        """Delete the jobs whose results are durable. Safe to repeat."""
        if jobs := [(r.job_id, r.row) for r in self._durable if isinstance(r.row, Row)]:
            self._delete(jobs)
        self._durable = []

    def _delete(self, jobs: list[tuple[str, Row]]) -> None:
        ids = [job_id for job_id, _ in jobs]
        with self._connection.pipeline(transaction=False) as pipe:
            delete_jobs(pipe, self._by_queue(jobs))
            self._ended.delete(pipe, ids)
            pipe.execute()
        self._ended.forget(ids)

    def _by_queue(self, jobs: Iterable[tuple[str, Row]]) -> dict[str, list[str]]:
        by_queue: dict[str, list[str]] = {}
        for job_id, row in jobs:
            name = queue_name(row.request.model, self._priority)
            by_queue.setdefault(name, []).append(job_id)
        return by_queue
