"""Feeds detached batches to the workers: rows come from Redis, and results go back there."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.exceptions import LockError, NoPermissionError, ResponseError
from redis.lock import Lock
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.serializers import JSONSerializer

from omlx_producer.bulk.batch import (
    BATCHES_KEY,
    CANCELLING,
    ROWS_AT_ONCE,
    Batch,
    open_batches,
)
from omlx_producer.bulk.batch_state import USAGE, BatchState
from omlx_producer.bulk.feed import Feed
from omlx_producer.bulk.jobs import job_id_of, read_statuses
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.ordering import balanced
from omlx_producer.bulk.row import BadRow, Row, RowResult, write_line
from omlx_producer.errors import OmlxQueueError, UnknownJob, one_line
from omlx_producer.outage import passes

log = logging.getLogger(__name__)

# After this long without a renewal another feeder takes over.
LOCK_SECONDS = 15.0
LOOK_SECONDS = 1.0
WAIT_SECONDS = 0.5

# What the data of one batch may raise.
_BROKEN = (ResponseError, ValueError, KeyError)

# A result replaces its row. A row that is gone has its result: the call was repeated after a lost
# answer, or another feeder took over.
_SETTLE = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #ARGV, {3 + len(USAGE)} do
  local entry = ARGV[i] .. '-0'
  if #redis.call('XRANGE', KEYS[2], entry, entry) == 1 then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
    redis.call('HINCRBY', KEYS[4], ARGV[i + 2], 1)
    for k, name in ipairs({{{", ".join(map(repr, USAGE))}}}) do
      redis.call('HINCRBY', KEYS[4], name, ARGV[i + 2 + k])
    end
    redis.call('XDEL', KEYS[2], entry)
  end
end
return 1
"""


class LockLost(OmlxQueueError):
    """Another feeder has taken over this batch."""


class BatchSink:
    """The sink of a batch; see `omlx_producer.bulk.feed.Sink`.

    Args:
        token: of the batch's lock. Only its holder may write results.
    """

    def __init__(self, batch: Batch, token: bytes) -> None:
        self._keys = [batch.lock_key, batch.rows_key, batch.results_key, batch.key]
        self._token = token
        self._settle = batch.connection.register_script(_SETTLE)

    def commit(self, results: Sequence[RowResult]) -> None:
        """Replace rows by their results.

        Raises:
            LockLost: if another feeder has taken over.
        """
        args: list[Any] = [self._token]
        for result in results:
            meter = Meter()
            meter.count([result])
            args += [
                result.row.line,
                zlib.compress(write_line(result)),
                "ok" if result.ok else f"failed:{result.code}",
                *(getattr(meter, name) for name in USAGE),
            ]
        if not self._settle(keys=self._keys, args=args):
            raise LockLost("another feeder has taken over")


class BatchFeed:
    """A batch that this process feeds while it holds the lock."""

    def __init__(self, batch: Batch, state: BatchState, lock: Lock) -> None:
        self.batch = batch
        self._lock = lock
        self._renewed_at = self._looked_at = time.monotonic()
        self._cancelling = state.state == CANCELLING
        rows = batch.unfinished()
        if self._cancelling:
            # Only rows with jobs, left by another feeder.
            rows = _in_redis(batch, rows, lock)
        self._feed = Feed(
            batch.connection,
            batch.run,
            balanced(rows),
            BatchSink(batch, lock.local.token),
            window=None if self._cancelling else state.window,
            priority=state.priority,
            job_timeout=state.job_timeout,
        )
        if self._cancelling:
            while not self._feed.exhausted:
                self._feed.turn(0)
            self._feed.stop()

    @classmethod
    def begin(cls, batch: Batch) -> BatchFeed | None:
        """Take a batch; None if another feeder has it, or it needs no feeder.

        Raises:
            LockLost: if another feeder has taken over meanwhile.
            UnknownJob: if the batch no longer exists.
        """
        lock = Lock(batch.connection, batch.lock_key, timeout=LOCK_SECONDS, thread_local=False)
        if not lock.acquire(blocking=False):
            return None
        state = batch.read()
        if state.over or state.state == "uploading":
            lock.release()
            return None
        return cls(batch, state, lock)

    def turn(self, wait: float) -> bool:
        """Feed the batch a little; returns whether anything is left to do.

        Raises:
            LockLost: if another feeder has taken over.
        """
        now = time.monotonic()
        if now - self._renewed_at > LOCK_SECONDS / 5:
            _renew(self._lock)
            self._renewed_at = now
        if now - self._looked_at > LOOK_SECONDS:
            self._look(self.batch.read().state)
            self._looked_at = now
        self._feed.turn(wait)
        if self._feed.busy:
            return True
        if self._cancelling or not any(True for _ in self.batch.unfinished()):
            self._feed.sweep()
            self.batch.end("cancelled" if self._cancelling else "done")
        # Else, or if it has not ended, Redis has lost results. Their rows are back and need a feed
        # that begins with them.
        self.leave()
        return False

    def recover(self) -> None:
        """See `Feed.recover`."""
        self._feed.recover()

    def leave(self) -> None:
        """Let another feeder take over. Its jobs stay in Redis."""
        try:
            self._lock.release()
        except LockError:
            # Another feeder has it already.
            return

    def _look(self, state: str) -> None:
        if state != CANCELLING:
            return
        if not self._cancelling:
            self._cancelling = True
            # Stop running jobs at the next look: stopped now, waiting rows would take their places.
            self._feed.stop()
            return
        job_ids = self._feed.job_ids
        for job_id, status in zip(
            job_ids, read_statuses(self.batch.connection, job_ids), strict=True
        ):
            if status == "started":
                _stop(self.batch.connection, job_id)


class Feeder:
    """Feeds all batches that no other feeder has."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._feeds: dict[str, BatchFeed] = {}
        self._looked_at = float("-inf")
        self._open: list[str] = []
        self._broken: set[str] = set()

    @property
    def idle(self) -> bool:
        """Whether no open batch is left, its own or another feeder's. Broken ones do not count."""
        return not self._feeds and not self._open

    def turn(self) -> None:
        """Feed each batch a little.

        Raises:
            redis.exceptions.RedisError: call `recover` and try again.
        """
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._look()
        if not self._feeds:
            time.sleep(WAIT_SECONDS / 5)
        for batch_id, feed in list(self._feeds.items()):
            try:
                if not feed.turn(WAIT_SECONDS / len(self._feeds)):
                    del self._feeds[batch_id]
            except (LockLost, UnknownJob):
                del self._feeds[batch_id]
            except _BROKEN as error:
                self._drop(batch_id, error)

    def recover(self) -> None:
        for feed in self._feeds.values():
            feed.recover()

    def leave(self) -> None:
        """Let other feeders take over at once."""
        for feed in self._feeds.values():
            feed.leave()
        self._feeds.clear()

    def _look(self) -> None:
        found = open_batches(self._connection)
        self._open = [batch_id for batch_id in found if batch_id not in self._broken]
        for batch_id in self._open:
            if batch_id not in self._feeds:
                try:
                    feed = BatchFeed.begin(Batch(self._connection, batch_id))
                except (LockLost, LockError):
                    continue
                except UnknownJob:
                    # Its other keys expire by themselves.
                    self._connection.zrem(BATCHES_KEY, batch_id)
                    continue
                except _BROKEN as error:
                    self._drop(batch_id, error)
                    continue
                if feed is not None:
                    self._feeds[batch_id] = feed
        self._looked_at = time.monotonic()

    def _drop(self, batch_id: str, error: Exception) -> None:
        """Stop feeding a batch whose data are broken.

        Raises:
            redis.exceptions.RedisError: the error, if it is the server's and not the batch's.
        """
        if passes(error) or isinstance(error, NoPermissionError):
            raise error
        reason = one_line(str(error))
        log.warning("%s: its data are broken (%s); submit its rows again", batch_id, reason)
        self._feeds.pop(batch_id, None)
        self._broken.add(batch_id)


def _renew(lock: Lock) -> None:
    """Renew a lock; raises LockLost if another feeder has taken over."""
    try:
        lock.reacquire()
    except LockError:
        raise LockLost("another feeder has taken over") from None


def _in_redis(batch: Batch, rows: Iterator[Row | BadRow], lock: Lock) -> Iterator[Row | BadRow]:
    """The rows that have a job. Renews the lock: all rows may be read before the first is found."""
    while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
        _renew(lock)
        ids = [job_id_of(batch.run, row) for row in chunk]
        statuses = read_statuses(batch.connection, ids)
        yield from (row for row, status in zip(chunk, statuses, strict=True) if status)


def _stop(connection: redis.Redis, job_id: str) -> None:
    try:
        send_stop_job_command(connection, job_id, serializer=JSONSerializer)
    except (InvalidJobOperation, NoSuchJobError):
        # The job has ended meanwhile.
        return
