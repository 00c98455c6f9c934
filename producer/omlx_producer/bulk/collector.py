"""The batches of a run: uploads its rows, a window at a time, and collects their results.

They are detached batches of one model each. The next window of a model goes to Redis when half of
the last has ended, so at most two windows' rows of it are there. Results leave Redis once they are
durable in the sink, and a batch with its last one. So the process may be killed at any moment and
the same run repeated: it goes on with the batches whose ids begin with that of the run, and knows
their rows by their digests. What is left of it in Redis goes on meanwhile.

Rows with a result are found by their names in the hash of results, `LOOK_SECONDS` apart. After an
outage, and every `RECONCILE_SECONDS`, rows that Redis has lost are uploaded again.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import redis
from redis.exceptions import RedisError

from omlx_producer.bulk.batch import Batch, EndedRows, run_batches
from omlx_producer.bulk.row import CANCELLED, BadRow, Row, RowResult, read_line
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.complaints import waiting_text
from omlx_producer.errors import JobCancelled, UnknownJob
from omlx_producer.outage import Outage, passes
from omlx_producer.signals import StopSignals
from omlx_producer.terminal import write
from omlx_producer.wire import Priority, queue_name

# Keeps four workers with 256 rows each busy while the client is away for as long as a row takes.
DEFAULT_WINDOW = 1024
# Two windows of photos, 3 MB each, keep 32 rows busy.
WINDOW_SIZE = 64 * 2**20
HELD_ROWS = 16 * 1024
HELD_SIZE = 64 * 2**20
# Rows read in one turn.
READ = 1024
# Results read in one call: a response may hold many log-probabilities.
FETCH = 50
# Results, or seconds, per write to the disk.
GROUP = 256
GROUP_SECONDS = 0.25
LOOK_SECONDS = 0.1
RECONCILE_SECONDS = 30.0
TAKE_BACK_SECONDS = 0.5
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


@dataclass(eq=False)
class WindowBatch:
    """A batch of a run.

    Attributes:
        queue: of its rows.
        size: how many rows it had without a result when it was uploaded, or found.
        rows: those without a result here, by name.
        unseen: names of rows that an earlier command has uploaded and the input has not shown yet,
            by digest.
        fetched: names of rows whose results are here and not durable.
        cancelled: whether it was cancelled before this command.
    """

    batch: Batch
    queue: str
    size: int
    rows: dict[str, Row] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)
    cancelled: bool = False

    @property
    def left(self) -> int:
        """How many rows have no result here."""
        return len(self.rows) + len(self.unseen)


class Collector:
    """Takes the rows of a run through its batches.

    Args:
        run: the id of the run. The ids of its batches begin with it.
        rows: the rows to run, each once.
        window: rows of a batch, at most, and `WINDOW_SIZE` of their prompts. A longer prompt
            goes alone. Rows of a model that has two windows' rows in Redis are read past, up to
            `HELD_ROWS` and `HELD_SIZE`, so that a model that nobody serves holds up no other.
        on_results: called with results that are durable.
        rerun_failures: run a row again if Redis holds its failure of an earlier run.

    Attributes:
        stopped: whether rows that wait are taken back.
        cancelled: who has cancelled a batch, in words; empty if nobody did. The run then stops.
        waited: after a cancel of a batch, the rows that were taken out of Redis or stopped.
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
        self._priority: Priority = priority
        self._job_timeout = job_timeout
        self._rows: Iterator[Row | BadRow] = iter(rows)
        self._sink = sink
        self._window = window
        self._on_results = on_results
        self._rerun_failures = rerun_failures
        self._is_begun = False
        self._windows: list[WindowBatch] = []
        self._number = secrets.randbelow(1 << 16)
        # A batch whose upload has not ended, or whose end is not known.
        self._upload: WindowBatch | None = None
        # By model: rows that wait here for room.
        self._held: dict[str, deque[Row]] = {}
        self._held_rows = self._held_size = 0
        # By digest: results of rows that have not come yet, and where the others are in Redis.
        self._found: dict[str, tuple[WindowBatch, str, bytes]] = {}
        self._places: dict[str, tuple[WindowBatch, str]] = {}
        self._settled: list[RowResult] = []
        self._settled_at = 0.0
        self._durable: list[RowResult] = []
        self._exhausted = self.stopped = False
        self._reconciled_at = time.monotonic()
        self._taken_back_at = float("-inf")
        self.cancelled = ""
        self.waited: list[Row] = []

    @property
    def in_flight(self) -> int:
        """Rows in Redis that have no result here yet."""
        return sum(len(window.rows) for window in self._windows)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        held = self.in_flight or self._upload or self._held or self._settled or self._durable
        return not self._exhausted or bool(held)

    def turn(self, wait: float) -> None:
        """Do what is due.

        Args:
            wait: seconds to wait for rows to end, at most.

        Raises:
            redis.exceptions.RedisError: nothing is lost; call `recover` and try again.
            OSError: if the sink cannot be written.
        """
        if not self._is_begun:
            self._windows = self._find()
            self._is_begun = True
        if self.stopped and time.monotonic() - self._taken_back_at >= TAKE_BACK_SECONDS:
            self._take_back()
        self._acknowledge()
        if time.monotonic() - self._reconciled_at > RECONCILE_SECONDS:
            self._reconcile()
        has_more = self._enter()
        self._collect(0 if has_more else wait)
        if self._commit_is_due():
            self._commit()

    def recover(self) -> None:
        """Look for lost rows: Redis was away and may have lost data."""
        self._reconciled_at = float("-inf")

    def stop(self) -> None:
        """Take back the rows that wait. The run is over when those that run have ended."""
        self._rows = iter(())
        self._held.clear()
        self._held_rows = self._held_size = 0
        self._exhausted = self.stopped = True

    def abandon(self) -> None:
        """Take the rows that wait, and those that have ended, out of Redis. No more turns follow.

        Raises:
            redis.exceptions.RedisError: if Redis does not answer; what is left expires.
        """
        self._drop_upload()
        for window in self._windows:
            if window.batch.take_back([window.queue]):
                window.batch.acknowledge([*window.fetched])
            else:
                window.batch.delete([window.queue])

    def sweep(self) -> None:
        """Drop what earlier runs left behind, of rows that are done, edited or removed.

        Call only at the end of all rows. What an outage keeps in Redis expires by itself.
        """
        try:
            for window in self._windows:
                window.batch.delete([window.queue])
        except RedisError as error:
            if not passes(error):
                raise

    # Entering

    def _find(self) -> list[WindowBatch]:
        """The batches that an earlier command has left."""
        windows = []
        for state in run_batches(self._connection, self._run):
            batch, (queue, *_) = Batch(self._connection, state.id), (*state.queues, "")
            names = batch.unfinished([queue])
            unseen = {digest: name for name, digest in names.items()}
            cancelled = bool(batch.ended().cancelled_by)
            windows.append(WindowBatch(batch, queue, len(unseen), {}, unseen, cancelled=cancelled))
            self._look_at(windows[-1])
        return windows

    def _enter(self) -> bool:
        """Read `READ` rows at most, and upload the windows for which Redis has room.

        Returns:
            Whether there is more to do at once.
        """
        if self._upload:
            self._drop_upload()
        has_more = all(self._take_row() for _ in range(READ))
        for model in [*self._held]:
            while (rows := self._next(model)) and (len(rows) == self._window or not has_more):
                self._send(model, rows)
        return has_more

    def _take_row(self) -> bool:
        """Hold one row; False if there is none, or no room for it.

        Bad rows are settled and take no room in Redis.
        """
        full = self._held_rows >= HELD_ROWS or self._held_size >= HELD_SIZE
        if full or len(self._settled) >= self._window:
            return False
        new = next(self._rows, None)
        if new is None:
            self._exhausted = True
            return False
        if isinstance(new, BadRow):
            self._settle(RowResult.of_bad(new))
        else:
            self._join(new)
        return True

    def _join(self, row: Row) -> None:
        """Hold a row, unless an earlier command has uploaded it."""
        if row.digest in self._found:
            window, name, line = self._found.pop(row.digest)
            result = RowResult.of_line(row, line)
            if result.ok or not self._rerun_failures:
                self._end(window, name, row, result)
            else:
                self._hold([row])
                self._forget(window, name)
            return
        for window in self._windows:
            if row.digest in window.unseen:
                window.rows[window.unseen.pop(row.digest)] = row
                return
        self._hold([row])

    def _hold(self, rows: Sequence[Row], *, first: bool = False) -> None:
        for row in reversed(rows) if first else rows:
            held = self._held.setdefault(row.request.model, deque())
            held.appendleft(row) if first else held.append(row)
            self._held_rows += 1
            self._held_size += row.held

    def _next(self, model: str) -> list[Row]:
        """The next window's rows of a model; none if it has no room."""
        queue, rows, size = queue_name(model, self._priority), list[Row](), 0
        windows = [each for each in self._windows if each.queue == queue and each.left]
        room = 2 * self._window - sum(each.left for each in windows)
        if windows and (2 * windows[-1].left > windows[-1].size or room < self._window):
            return []
        for row in itertools.islice(self._held.get(model, ()), self._window):
            if size >= WINDOW_SIZE:
                break
            rows.append(row)
            size += row.held
        return rows

    def _send(self, model: str, rows: list[Row]) -> None:
        """Upload rows as a batch."""
        fields = {"home": 1, "priority": self._priority, "job_timeout": self._job_timeout}
        queue, begun = queue_name(model, self._priority), ""
        while not begun:
            self._number = (self._number + 1) % (1 << 16)
            batch = Batch.of_run(self._connection, f"{self._run}{self._number:04x}")
            begun = batch.begin(fields)
        named = {str(number): row for number, row in enumerate(rows, 1)}
        self._upload = WindowBatch(batch, queue, len(rows), named)
        for row in rows:
            self._held[model].popleft()
            self._held_rows -= 1
            self._held_size -= row.held
        if not self._held[model]:
            del self._held[model]
        try:
            # Who has cancelled a batch during its upload is told as of others.
            with contextlib.suppress(JobCancelled):
                batch.upload(rows, begun)
        except UnknownJob:
            self._drop_upload()
        else:
            self._windows.append(self._upload)
            self._upload = None

    def _drop_upload(self) -> None:
        """Take back a batch whose upload may not have ended."""
        if upload := self._upload:
            upload.batch.delete([upload.queue])
            self._upload = None
            if not self.stopped:
                self._hold([*upload.rows.values()], first=True)

    # Collecting

    def _collect(self, wait: float) -> None:
        """Take what has ended; wait only if there is nothing else to do."""
        new = False
        for window in [*self._windows]:
            new |= self._look_at(window)
        if not new and (self.in_flight or self._held):
            time.sleep(min(wait, LOOK_SECONDS))

    def _look_at(self, window: WindowBatch) -> bool:
        """Take the new results of a batch; returns whether there were any."""
        ended = window.batch.ended()
        self._heed(window, ended)
        names = [name for name in ended.names if name not in window.fetched]
        for start in range(0, len(names), FETCH):
            for name, line in window.batch.stored(names[start : start + FETCH]).items():
                self._fetch(window, name, line)
        return bool(names)

    def _fetch(self, window: WindowBatch, name: str, line: bytes) -> None:
        """Take a result."""
        window.fetched.add(name)
        if row := window.rows.get(name):
            self._end(window, name, row, RowResult.of_line(row, line))
        elif written := read_line(line):
            window.unseen.pop(written.digest, None)
            self._found[written.digest] = (window, name, line)

    def _end(self, window: WindowBatch, name: str, row: Row, result: RowResult) -> None:
        """Settle a result; but a row that a cancel of the batch has stopped counts as not run.

        After the cancel of an earlier command it runs.
        """
        window.rows.pop(name, None)
        if not ((self.cancelled or window.cancelled) and result.code == CANCELLED):
            self._places[row.digest] = window, name
            self._settle(result)
            return
        if self.stopped:
            self.waited.append(row)
        else:
            self._hold([row])
        self._forget(window, name)

    def _forget(self, window: WindowBatch, name: str) -> None:
        """Drop a result from Redis that is not taken."""
        window.batch.acknowledge([name])
        window.fetched.discard(name)

    def _heed(self, window: WindowBatch, ended: EndedRows) -> None:
        """Stop if somebody has cancelled a batch."""
        if ended.cancelled_by and not window.cancelled and not self.cancelled:
            self.cancelled = f"{window.batch.id} was cancelled by {ended.cancelled_by}"
            self.stop()
            self._take_back()

    def _reconcile(self) -> None:
        """Upload again the rows that Redis does not know."""
        for window in [*self._windows]:
            known = {*window.batch.unfinished([window.queue])}
            ended = window.batch.ended()
            self._heed(window, ended)
            if ended.state in ("", "uploading"):
                window.batch.delete([window.queue])
                known.clear()
            known.update(ended.names)
            lost = [window.rows.pop(name) for name in [*window.rows] if name not in known]
            window.unseen = {d: name for d, name in window.unseen.items() if name in known}
            if not self.stopped:
                self._hold(lost, first=True)
        self._reconciled_at = time.monotonic()

    def _take_back(self) -> None:
        for window in self._windows:
            known = {*window.batch.take_back([window.queue]), *window.batch.ended().names}
            left = [window.rows.pop(name) for name in [*window.rows] if name not in known]
            window.unseen = {d: name for d, name in window.unseen.items() if name in known}
            if self.cancelled:
                self.waited += left
        self._taken_back_at = time.monotonic()

    # Committing

    def _settle(self, result: RowResult) -> None:
        if not self._settled:
            self._settled_at = time.monotonic()
        self._settled.append(result)

    def _commit_is_due(self) -> bool:
        if not self._settled:
            return False
        late = time.monotonic() - self._settled_at >= GROUP_SECONDS
        return late or len(self._settled) >= GROUP or not self.in_flight

    def _commit(self) -> None:
        self._sink.commit(self._settled)
        self._durable, self._settled = self._settled, []
        self._on_results(self._durable)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Drop from Redis the results that are durable, and batches without others. Safe to
        repeat."""
        names = defaultdict[WindowBatch, list[str]](list)
        digests = _uploaded(self._durable)
        for digest in digests:
            window, name = self._places[digest]
            names[window].append(name)
        for window, fetched in names.items():
            window.batch.acknowledge(fetched)
            window.fetched.difference_update(fetched)
        for digest in digests:
            del self._places[digest]
        self._durable = []
        for window in [*self._windows]:
            if not window.left and not window.fetched:
                window.batch.delete([window.queue])
                self._windows.remove(window)


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
