"""The batch of a run: keeps it filled with rows, and collects their results.

It is like a detached batch, but only a window of rows is uploaded ahead, and results leave Redis
once they are durable in the sink. A row is known to the batch, by its digest, from before its
upload until then; uploading it again changes nothing. So the process may be killed at any moment
and the same run repeated. What is left of it in Redis goes on meanwhile.

Rows with a result are found by their names in the hash of results, `LOOK_SECONDS` apart. After an
outage, and every `RECONCILE_SECONDS`, rows that Redis has lost are uploaded again.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import redis
from redis.exceptions import RedisError

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import CANCELLED, BadRow, Row, RowResult
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.complaints import waiting_text
from omlx_producer.outage import Outage, passes
from omlx_producer.signals import StopSignals
from omlx_producer.terminal import write
from omlx_producer.wire import Priority

# Keeps four workers with 256 rows each busy while the client is away for as long as a row takes.
DEFAULT_WINDOW = 1024
WINDOW_CHARACTERS = HELD_CHARACTERS = 64 * 2**20
HELD_ROWS = 16 * 1024
# Rows uploaded in one call.
ENTER = 100
# Results read in one call: a response may hold many log-probabilities.
FETCH = 50
# Results, or seconds, per write to the disk.
GROUP = 256
GROUP_SECONDS = 0.25
LOOK_SECONDS = 0.1
RECONCILE_SECONDS = 30.0
WITHDRAW_SECONDS = 0.5
# Of the loop: a turn's wait, how long Redis may be away, pauses between tries.
WAIT_SECONDS = 0.5
PATIENCE_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


class Sink(Protocol):
    """Where results go, and what says which rows are done."""

    def commit(self, results: Sequence[RowResult]) -> None:
        """Make results durable; they stay in Redis until this returns.

        A commit that was cut off may be repeated. It must count each result once.
        """


class Collector:
    """Takes the rows of a run through its batch.

    Args:
        run: the id of the run, and of its batch.
        rows: the rows to run, each once.
        window: rows of each model in Redis, at most, and `WINDOW_CHARACTERS` of their prompts. A
            longer prompt goes alone. Rows of a model whose window is full are read past, up to
            `HELD_ROWS` and `HELD_CHARACTERS`, so that a model that nobody serves holds up no other.
        on_results: called with results that are durable.
        rerun_failures: run a row again if Redis holds its failure of an earlier run.

    Attributes:
        stopped: whether rows that wait are withdrawn.
        cancelled_by: who has cancelled the batch; empty if nobody did. The run then stops.
        waited: after a cancel of the batch, the rows that it took out of Redis or stopped.
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
        self._batch = Batch.of_run(connection, run)
        self._settings: tuple[Priority, int] = (priority, job_timeout)
        self._rows: Iterator[Row | BadRow] = iter(rows)
        self._sink = sink
        self._window = window
        self._on_results = on_results
        self._rerun_failures = rerun_failures
        # By digest: rows without a result here. Those not sent may not be in Redis.
        self._in_flight: dict[str, Row] = {}
        self._unsent: dict[str, Row] = {}
        # By model: rows in flight and their characters, and rows that wait here for room.
        self._load: dict[str, tuple[int, int]] = {}
        self._held: dict[str, deque[Row]] = {}
        self._held_rows = self._held_characters = 0
        self._has_more = True
        # By digest: results of rows that have not come yet, left by an earlier run.
        self._found: dict[str, bytes] | None = None
        self._settled: list[RowResult] = []
        self._settled_at = 0.0
        self._durable: list[RowResult] = []
        self._exhausted = self.stopped = False
        self._reconciled_at = time.monotonic()
        self._withdrawn_at = float("-inf")
        # Digests of the rows that were in Redis when a cancelled batch was opened again.
        self._cancelled_before: set[str] = set()
        self.cancelled_by = ""
        self.waited: list[Row] = []

    @property
    def cancelled(self) -> str:
        """Who has cancelled the batch, in words; empty if nobody did."""
        return f"{self._batch.id} was cancelled by {self.cancelled_by}" * bool(self.cancelled_by)

    @property
    def in_flight(self) -> int:
        """Rows in Redis that have no result here yet."""
        return len(self._in_flight)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        held = self._in_flight or self._held or self._settled or self._durable
        return not self._exhausted or bool(held)

    def turn(self, wait: float) -> None:
        """Do what is due.

        Args:
            wait: seconds to wait for rows to end, at most.

        Raises:
            redis.exceptions.RedisError: nothing is lost; call `recover` and try again.
            OSError: if the sink cannot be written.
        """
        if self._found is None:
            known = self._batch.known()
            if self._batch.open_run(*self._settings):
                self._cancelled_before = known
            self._found = {}
            self._collect(0)
        self._acknowledge()
        self._enter()
        if self.stopped and time.monotonic() - self._withdrawn_at >= WITHDRAW_SECONDS:
            self._withdraw()
        self._collect(wait)
        if time.monotonic() - self._reconciled_at > RECONCILE_SECONDS:
            self._reconcile()
        if self._commit_is_due():
            self._commit()

    def recover(self) -> None:
        """Look for lost rows: Redis was away and may have lost data."""
        self._reconciled_at = float("-inf")

    def stop(self) -> None:
        """Withdraw the rows that wait. The run is over when those that run have ended."""
        self._rows = iter(())
        self._held.clear()
        self._exhausted = self.stopped = True

    def abandon(self) -> None:
        """Take the rows that wait, and those that have ended, out of Redis. No more turns follow.

        Raises:
            redis.exceptions.RedisError: if Redis does not answer; what is left expires.
        """
        self._withdraw()
        self._batch.acknowledge(_uploaded(self._settled))

    def sweep(self) -> None:
        """Drop what earlier runs left behind, of rows that are done, edited or removed.

        Call only at the end of all rows. What an outage keeps in Redis expires by itself.
        """
        try:
            self._batch.withdraw()
            self._batch.end_run()
            self._collect(0)
            self._batch.acknowledge(list(self._found or ()))
        except RedisError as error:
            if not passes(error):
                raise

    # Entering

    def _has_room(self, model: str) -> bool:
        rows, characters = self._load.get(model, (0, 0))
        return rows + len(self._settled) < self._window and characters < WINDOW_CHARACTERS

    def _enter(self) -> None:
        """Take `ENTER` rows at most, and upload those for which Redis has room."""
        for _ in range(ENTER):
            self._has_more = self._take_row()
            if not self._has_more:
                break
        self._send()

    def _take_row(self) -> bool:
        """Let one row join or hold it; False if there is none, or no room for it.

        Bad rows are settled and take no room in Redis.
        """
        for model, held in self._held.items():
            if self._has_room(model):
                row = held.popleft()
                self._held_rows -= 1
                self._held_characters -= row.characters
                if not held:
                    del self._held[model]
                self._join(row)
                return True
        full = self._held_rows >= HELD_ROWS or self._held_characters >= HELD_CHARACTERS
        if full or len(self._settled) >= self._window:
            return False
        new = next(self._rows, None)
        if new is None:
            self._exhausted = True
            return False
        if isinstance(new, BadRow):
            self._settle(RowResult.of_bad(new))
        elif self._has_room(new.request.model):
            self._join(new)
        else:
            self._held.setdefault(new.request.model, deque()).append(new)
            self._held_rows += 1
            self._held_characters += new.characters
        return True

    def _join(self, row: Row) -> None:
        self._in_flight[row.digest] = row
        self._count(row, 1)
        found = (self._found or {}).pop(row.digest, None)
        if found is None:
            self._unsent[row.digest] = row
            return
        result = RowResult.of_line(row, found)
        if result.ok or not self._rerun_failures:
            self._end(result, row)
        else:
            self._batch.acknowledge([row.digest])
            self._unsent[row.digest] = row

    def _count(self, row: Row, rows: int) -> None:
        before, characters = self._load.get(row.request.model, (0, 0))
        self._load[row.request.model] = (before + rows, characters + rows * row.characters)

    def _send(self) -> None:
        while self._unsent:
            rows = list(itertools.islice(self._unsent.values(), ENTER))
            self._batch.enter(rows)
            for row in rows:
                del self._unsent[row.digest]

    # Collecting

    def _collect(self, wait: float) -> None:
        """Take what has ended; wait only if there is nothing else to do."""
        names, cancelled_by = self._batch.ended()
        self._heed(cancelled_by)
        known = {*(self._found or ()), *_uploaded(itertools.chain(self._settled, self._durable))}
        new = [name for name in names if name not in known]
        self._look_at(new)
        if not new and self._in_flight and not self._has_more:
            time.sleep(min(wait, LOOK_SECONDS))

    def _look_at(self, digests: Sequence[str]) -> None:
        """Settle the rows that have a result."""
        for start in range(0, len(digests), FETCH):
            chunk = digests[start : start + FETCH]
            for digest, line in self._batch.stored(chunk).items():
                if row := self._in_flight.get(digest):
                    self._end(RowResult.of_line(row, line), row)
                elif self._found is not None:
                    self._found[digest] = line

    def _end(self, result: RowResult, row: Row) -> None:
        """Settle a result; but a row that a cancel of the batch has stopped counts as not run.

        After the cancel of an earlier command it runs.
        """
        stopped = self.cancelled_by or row.digest in self._cancelled_before
        if not (stopped and result.code == CANCELLED):
            self._settle(result)
            return
        self._batch.acknowledge([row.digest])
        self._cancelled_before.discard(row.digest)
        if self.stopped:
            self.waited.append(row)
            self._leave(row.digest)
        else:
            self._unsent[row.digest] = row

    def _heed(self, cancelled_by: str) -> None:
        if cancelled_by and not self.cancelled_by:
            self.cancelled_by = cancelled_by
            self.stop()
            self._withdraw()

    def _reconcile(self) -> None:
        """Upload again the rows that Redis does not know."""
        self._heed(self._batch.open_run(*self._settings, again=True))
        if not self.cancelled_by:
            for digest in self._batch.unknown(list(self._in_flight)):
                self._unsent[digest] = self._in_flight[digest]
            self._send()
        self._reconciled_at = time.monotonic()

    def _withdraw(self) -> None:
        left = [*self._batch.withdraw(), *self._unsent]
        if self.cancelled_by:
            # Whoever cancels takes rows out, too.
            left += self._batch.unknown([d for d in self._in_flight if d not in left])
            self.waited += [row for each in left if (row := self._in_flight.get(each))]
        for digest in left:
            self._leave(digest)
        self._withdrawn_at = time.monotonic()

    # Committing

    def _settle(self, result: RowResult) -> None:
        if not self._settled:
            self._settled_at = time.monotonic()
        for digest in _uploaded([result]):
            self._leave(digest)
        self._settled.append(result)

    def _leave(self, digest: str) -> None:
        self._unsent.pop(digest, None)
        if row := self._in_flight.pop(digest, None):
            self._count(row, -1)

    def _commit_is_due(self) -> bool:
        if not self._settled:
            return False
        late = time.monotonic() - self._settled_at >= GROUP_SECONDS
        return late or len(self._settled) >= GROUP or not self._in_flight

    def _commit(self) -> None:
        self._sink.commit(self._settled)
        self._durable, self._settled = self._settled, []
        self._on_results(self._durable)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Drop from Redis the results that are durable. Safe to repeat."""
        self._batch.acknowledge(_uploaded(self._durable))
        self._durable = []


def _uploaded(results: Iterable[RowResult]) -> list[str]:
    """The digests of rows that were in Redis. A bad row may have that of another."""
    return [result.row.digest for result in results if isinstance(result.row, Row)]


def turns(
    collector: Collector, signals: StopSignals, *, patience: float = PATIENCE_SECONDS
) -> Iterator[None]:
    """Turn a collector until nothing is left to do; yields after each turn.

    Args:
        patience: seconds for which Redis may be away.

    Raises, while iterating:
        redis.exceptions.RedisError: if Redis is away for longer, or refuses.
        KeyboardInterrupt: at the second interrupt, or the first if Redis is away.
    """
    outage, told = Outage(FIRST_PAUSE, LONGEST_PAUSE), False
    while collector.busy:
        if collector.cancelled:
            if not told and collector.in_flight:
                write(
                    f"\n{collector.cancelled}; waiting for the rows that run, of "
                    f"{collector.in_flight} in Redis. Interrupt to leave at once\n",
                    err=True,
                )
                told = True
            if signals.asked:
                raise KeyboardInterrupt
        if signals.asked and not collector.stopped:
            collector.stop()
            write(
                f"\nstopping; waiting for the rows that run, of {collector.in_flight} in Redis. "
                "Interrupt again to leave at once\n",
                err=True,
            )
        try:
            collector.turn(WAIT_SECONDS)
            outage.answered()
        except RedisError as error:
            if collector.stopped:
                # Nothing can be waited for.
                raise KeyboardInterrupt from error
            _wait(outage, error, patience)
            collector.recover()
        yield


def _wait(outage: Outage, error: RedisError, patience: float) -> None:
    """Sleep before the next try.

    Raises:
        redis.exceptions.RedisError: the error, if it does not pass, or patience has run out.
    """
    away = outage.seconds
    if away > patience:
        raise error
    pause = outage.failed(error)
    if not away:
        write(waiting_text(error) + "\n", err=True)
    time.sleep(pause)
