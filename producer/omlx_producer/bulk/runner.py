"""The loop of a run: keep the window full, collect what has ended, make it durable, let it go.

A row is in Redis from before its job is made until after its result is durable in the sink, and
whatever happens in between, running the row again finds the job or makes it.

Rows that have ended are heard of on one stream for the whole run. It is not believed: an entry
says which job to look at. Every `RECONCILE_SECONDS`, and after any trouble with Redis, all rows of
the window are looked at, for servers lose data, by a restart so short that redis-py hides it even,
and tools that know nothing of the stream end jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from omlx_producer.bulk.ended import EndedStream
from omlx_producer.bulk.jobs import (
    job_id_of,
    let_go,
    read_endings,
    read_origins,
    read_statuses,
    withdraw,
)
from omlx_producer.bulk.row import BadRow, Row, RowResult
from omlx_producer.bulk.sink import Sink
from omlx_producer.bulk.window import DEFAULT_WINDOW, InFlight, Window
from omlx_producer.enqueue import JOB_SECONDS, Limits, NewJob, enqueue
from omlx_producer.outcome import ENDINGS, Outcome
from omlx_producer.protocol import ENDED_SECONDS, Priority, queue_name

# One MULTI of this many jobs holds other clients up for about half a millisecond.
FEED = 100
LOOK = 200
# How many results, or seconds, one write to the disk is for.
GROUP = 256
GROUP_SECONDS = 0.25
RECONCILE_SECONDS = 30.0
WITHDRAW_SECONDS = 0.5
MAX_LOSSES = 3


class Runner:
    """Runs the rows of one run.

    Args:
        run: the run's id, which its jobs carry.
        rows: what is to run, each row once.
        sink: where results go.
        on_results: told of results that are durable.
        rerun_failures: run rows again whose jobs from an earlier run are still there, failed.
    """

    def __init__(
        self,
        connection: redis.Redis,
        run: str,
        rows: Iterable[Row | BadRow],
        sink: Sink,
        *,
        window: int = DEFAULT_WINDOW,
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
        # Results outlive a client that is away for a week; the window bounds how many there are.
        self._limits = Limits(job_timeout, ENDED_SECONDS, ENDED_SECONDS)
        self._on_results = on_results
        self._rerun_failures = rerun_failures
        self._ended = EndedStream(connection, run)
        self._window = Window(window)
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
        """Rows that are in Redis and have no result here yet."""
        return len(self._window)

    @property
    def job_ids(self) -> list[str]:
        """The jobs of those rows."""
        return [flight.job_id for flight in self._window]

    @property
    def exhausted(self) -> bool:
        """Whether all rows have been brought in."""
        return self._exhausted

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return not self._exhausted or bool(self._window or self._settled or self._durable)

    def turn(self, wait: float) -> None:
        """Do what there is to do, waiting at most so many seconds for rows to end.

        Raises:
            redis.exceptions.RedisError: nothing is lost then; call `recover`, then go on.
            OSError: if the sink cannot be written.
        """
        self._let_go()
        self._feed()
        if self._stopping:
            self._withdraw()
        self._collect(wait)
        if time.monotonic() - self._reconciled_at > RECONCILE_SECONDS:
            self._reconcile()
        if self._commit_is_due():
            self._commit()

    def recover(self) -> None:
        """Trust nothing that was known of Redis: it was away, and may have forgotten."""
        self._ended.rewind()
        self._reconciled_at = float("-inf")

    def stop_feeding(self) -> None:
        """Take the rows that wait out of Redis and go on only until those that run are over."""
        self._rows = iter(())
        self._exhausted = self._stopping = True

    def sweep(self) -> None:
        """Let go of what earlier runs have left: jobs of rows that are done, edited or removed.

        Only when this run has gone through all rows.
        """
        while self._ended.read(None):
            pass
        strays = list(self._ended.entries)
        origins = read_origins(self._connection, strays)
        with self._connection.pipeline(transaction=False) as pipe:
            let_go(pipe, origins)
            self._ended.delete(pipe, strays)
            pipe.execute()
        self._ended.forget(strays)
        self._ended.drop_if_empty()

    # Feeding

    @property
    def _room(self) -> int:
        return 0 if self._exhausted else self._window.room(len(self._settled))

    def _feed(self) -> None:
        """Bring in up to `FEED` rows; bad ones are settled and need no room in Redis."""
        flights = []
        for _ in range(FEED):
            if not self._room:
                break
            row = next(self._rows, None)
            if row is None:
                self._exhausted = True
            elif isinstance(row, BadRow):
                self._settle(RowResult(row, "", code=row.code, reason=row.reason))
            else:
                flights.append(self._window.join(job_id_of(self._run, row), row))
        if not flights:
            return
        self._adopt(flights)
        self._enqueue([flight for flight in flights if not flight.enqueued])

    def _adopt(self, flights: list[InFlight]) -> None:
        """Find the jobs that an earlier run of these rows has left, and what came of them."""
        statuses = read_statuses(self._connection, [flight.job_id for flight in flights])
        ended = []
        for flight, status in zip(flights, statuses, strict=True):
            flight.enqueued = status is not None
            if status in ENDINGS:
                ended.append(flight.job_id)
        self._look_at(ended, rerun_failures=self._rerun_failures)

    def _enqueue(self, flights: list[InFlight]) -> None:
        for start in range(0, len(flights), FEED):
            chunk = flights[start : start + FEED]
            # Once: another feeder may have enqueued them while this one slept.
            jobs = [NewJob(f.job_id, f.row.request, self._priority, once=True) for f in chunk]
            enqueue(self._connection, jobs, self._limits, self._queue)
            for flight in chunk:
                flight.enqueued = True

    # Collecting

    def _collect(self, wait: float) -> None:
        """Read the stream; wait only where there is nothing else to do meanwhile."""
        if self._settled:
            wait = min(wait, GROUP_SECONDS)
        idle = self._window and not self._room
        ended = self._ended.read(wait if idle else None)
        self._look_at([job_id for job_id in ended if job_id in self._window])

    def _look_at(self, job_ids: list[str], *, rerun_failures: bool = False) -> None:
        """Settle the rows of jobs that have ended; run those again whose jobs are gone."""
        again: list[InFlight] = []
        for job_id, outcome in read_endings(self._connection, job_ids).items():
            flight = self._window[job_id]
            if outcome is None:
                flight.losses += flight.enqueued
            if flight.losses > MAX_LOSSES:
                reason = f"Redis lost the row {flight.losses} times"
                self._settle(RowResult(flight.row, job_id, code="lost", reason=reason))
            elif outcome is None or (rerun_failures and outcome.ending != "finished"):
                again.append(flight)
            else:
                self._settle(_result(flight.row, outcome))
        if again:
            for flight in again:
                flight.enqueued = False
            self._delete([(flight.job_id, flight.row) for flight in again])
            self._enqueue(again)

    def _reconcile(self) -> None:
        """Look at every row of the window, whatever the stream has said."""
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
        self._let_go()

    def _let_go(self) -> None:
        """Remove from Redis what is durable elsewhere. Safe to do twice."""
        jobs = [(r.job_id, r.row) for r in self._durable if isinstance(r.row, Row)]
        if jobs:
            self._delete(jobs)
        self._durable = []

    def _delete(self, jobs: list[tuple[str, Row]]) -> None:
        ids = [job_id for job_id, _ in jobs]
        with self._connection.pipeline(transaction=False) as pipe:
            let_go(pipe, self._by_queue(jobs))
            self._ended.delete(pipe, ids)
            pipe.execute()
        self._ended.forget(ids)

    def _by_queue(self, jobs: Iterable[tuple[str, Row]]) -> dict[str, list[str]]:
        by_queue: dict[str, list[str]] = {}
        for job_id, row in jobs:
            name = queue_name(row.request.model, self._priority)
            by_queue.setdefault(name, []).append(job_id)
        return by_queue


def _result(row: Row, outcome: Outcome) -> RowResult:
    if outcome.ending == "finished" and isinstance(outcome.body, dict):
        return RowResult(row, outcome.job_id, body=outcome.body)
    code = outcome.ending if outcome.ending != "finished" else "no_response"
    reason = outcome.error or "the job's result is no response body"
    return RowResult(row, outcome.job_id, code=code, reason=reason)
