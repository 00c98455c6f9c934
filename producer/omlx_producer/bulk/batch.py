"""A detached batch: its rows, results and state, all in Redis.

Rows are a stream with the entry ids `<row number>-0`. Results are a hash by row number. A row stays
in the stream until its result is in the hash, and one script changes both. So a feeder that begins
with the stream continues where the last one was killed.

`omlx-submit feed` feeds batches, not the workers: it must go on while all workers are busy or
asleep, it may run where the Redis server runs, and it needs no model. Any number of feeders may
run. A lock gives each batch one feeder, and expires so that another can take over.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import RedisError, WatchError
from redis.utils import str_if_bytes

from omlx_producer.bulk.batch_state import BatchState
from omlx_producer.bulk.row import BadRow, Row, RowResult, digest_of, write_line
from omlx_producer.bulk.runfile import new_run_id
from omlx_producer.bulk.window import DEFAULT_WINDOW
from omlx_producer.enqueue import JOB_SECONDS
from omlx_producer.errors import InvalidRequest, UnknownJob, one_line
from omlx_producer.protocol import GenerationRequest, Priority

BATCHES_KEY = "omlx:batches"
# After the end of a batch, and after the last write of an upload.
KEEP_SECONDS = 7 * 24 * 3600
UPLOAD_SECONDS = 3600
ROWS_AT_ONCE = 200
OPEN, CANCELLING = "open", "cancelling"

# A hash without `created_at` is what a late write made of an expired batch.
_OPEN = """
if redis.call('HEXISTS', KEYS[1], 'created_at') == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'rows', ARGV[2])
for i = 1, 3 do redis.call('PERSIST', KEYS[i]) end
redis.call('ZADD', KEYS[4], ARGV[3], ARGV[4])
return 1
"""

_ASK_TO_CANCEL = f"""
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= '{OPEN}' and state ~= '{CANCELLING}' then return 0 end
redis.call('HSET', KEYS[1], 'state', '{CANCELLING}')
redis.call('ZADD', KEYS[2], ARGV[1], ARGV[2])
return 1
"""


def is_batch_id(text: str) -> bool:
    return re.fullmatch(r"batch-[0-9a-f]{12}", text) is not None


@dataclass(frozen=True)
class Batch:
    """One batch, by its keys."""

    connection: redis.Redis = field(repr=False)
    id: str

    @classmethod
    def create(
        cls,
        connection: redis.Redis,
        *,
        priority: Priority = "bulk",
        window: int = DEFAULT_WINDOW,
        job_timeout: int = JOB_SECONDS,
    ) -> Batch:
        """Make a new batch; fill it with `upload`."""
        batch = cls(connection, f"batch-{new_run_id()}")
        fields: dict[Any, Any] = {
            "state": "uploading",
            "priority": priority,
            "window": window,
            "job_timeout": job_timeout,
            "created_at": time.time(),
        }
        with connection.pipeline() as pipe:
            pipe.hset(batch.key, mapping=fields)
            pipe.expire(batch.key, UPLOAD_SECONDS)
            pipe.execute()
        return batch

    @property
    def run(self) -> str:
        """The id of its run, part of the ids of its jobs."""
        return self.id.removeprefix("batch-")

    @property
    def key(self) -> str:
        return f"omlx:batch:{self.run}"

    @property
    def rows_key(self) -> str:
        return f"{self.key}:rows"

    @property
    def results_key(self) -> str:
        return f"{self.key}:results"

    @property
    def lock_key(self) -> str:
        return f"{self.key}:feeder"

    def upload(self, rows: Iterable[Row | BadRow]) -> int:
        """Fill a new batch and open it to feeders; returns how many rows it has.

        Rows are numbered from 1. None runs before the end of the upload. What a killed upload
        leaves behind expires.

        Raises:
            UnknownJob: if the batch has expired meanwhile; no row runs.
        """
        count = 0
        pending: list[Row | BadRow] = []
        with self._kept():
            for row in rows:
                pending.append(row)
                if len(pending) == ROWS_AT_ONCE:
                    count = self._write(pending, count)
                    pending = []
            count = self._write(pending, count)
        keys = [self.key, self.rows_key, self.results_key, BATCHES_KEY]
        opened = self.connection.register_script(_OPEN)
        if not opened(keys=keys, args=[OPEN, count, time.time(), self.id]):
            raise UnknownJob(
                f"{self.id}: the upload made no progress for too long and has expired; run it again"
            )
        return count

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the upload from expiring, from its own thread: reading a row from a pipe may block
        for hours."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(UPLOAD_SECONDS / 4):
                # The upload itself meets an outage.
                with contextlib.suppress(RedisError), self.connection.pipeline() as pipe:
                    self._expire(pipe)
                    pipe.execute()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _write(self, rows: list[Row | BadRow], count: int) -> int:
        """Add rows to ``count`` others; returns how many there are then.

        redis-py repeats a transaction whose answer was lost. A watched one raises WatchError
        instead, and the stored number of rows says whether it has worked.
        """
        end = count + len(rows)
        while True:
            with self.connection.pipeline() as pipe, contextlib.suppress(WatchError):
                pipe.watch(self.key)  # type: ignore[no-untyped-call]
                if int(pipe.hget(self.key, "rows") or 0) == end:
                    return end
                pipe.multi()
                for number, row in enumerate(rows, start=count + 1):
                    if isinstance(row, BadRow):
                        line = write_line(RowResult.of_bad(row))
                        pipe.hset(self.results_key, str(number), zlib.compress(line))
                        pipe.hincrby(self.key, f"failed:{row.code}", 1)
                    else:
                        pipe.xadd(self.rows_key, {"row": _packed(row)}, id=f"{number}-0")
                pipe.hset(self.key, "rows", str(end))
                self._expire(pipe)
                pipe.execute()
                return end

    def _expire(self, pipe: Pipeline) -> None:
        for key in (self.key, self.rows_key, self.results_key):
            pipe.expire(key, UPLOAD_SECONDS)

    def unfinished(self) -> Iterator[Row | BadRow]:
        """The rows without a result, in order. A row's ``line`` is its number.

        A row that this version cannot read is a `BadRow`.
        """
        cursor = "-"
        while True:
            entries: Any = self.connection.xrange(self.rows_key, min=cursor, count=ROWS_AT_ONCE)
            for entry_id, fields in entries:
                cursor = f"({str_if_bytes(entry_id)}"
                yield _unpacked(int(entry_id.split(b"-")[0]), fields.get(b"row", b""))
            if len(entries) < ROWS_AT_ONCE:
                return

    def results(self, rows: int) -> Iterator[bytes]:
        """The output lines so far, in the order of the input."""
        for start in range(1, rows + 1, ROWS_AT_ONCE):
            numbers = [str(n) for n in range(start, min(start + ROWS_AT_ONCE, rows + 1))]
            packed: Any = self.connection.hmget(self.results_key, numbers)
            yield from (zlib.decompress(line) for line in packed if line is not None)

    def read(self) -> BatchState:
        """Read the state of the batch.

        Raises:
            UnknownJob: if it does not exist.
        """
        raw: Any = self.connection.hgetall(self.key) if is_batch_id(self.id) else {}
        fields = {str_if_bytes(name): str_if_bytes(value) for name, value in raw.items()}
        if "created_at" not in fields:
            raise UnknownJob(f"no batch has the id {self.id!r}: check the id, or it has expired")
        return BatchState.of(self.id, fields)

    def has_feeder(self) -> bool:
        return bool(self.connection.exists(self.lock_key))

    def ask_to_cancel(self) -> bool:
        """Tell its feeder to stop; see `omlx_producer.bulk.batch_feeder`.

        Returns False if nothing feeds it: it is over, or not uploaded yet.
        """
        ask = self.connection.register_script(_ASK_TO_CANCEL)
        return bool(ask(keys=[self.key, BATCHES_KEY], args=[time.time(), self.id]))

    def end(self, state: str) -> bool:
        """Close the batch: nothing feeds it any more, and its results expire in `KEEP_SECONDS`.

        Returns False if it is not ``done``: a restarted server may have brought back rows.
        """
        with self.connection.pipeline() as pipe:
            pipe.watch(self.rows_key)  # type: ignore[no-untyped-call]
            if state == "done" and pipe.xlen(self.rows_key):
                return False
            pipe.multi()
            pipe.hset(self.key, mapping={"state": state, "ended_at": time.time()})
            pipe.unlink(self.rows_key)
            pipe.expire(self.key, KEEP_SECONDS)
            pipe.expire(self.results_key, KEEP_SECONDS)
            pipe.zrem(BATCHES_KEY, self.id)
            try:
                pipe.execute()
            except WatchError:
                return False
        return True


def open_batches(connection: redis.Redis) -> list[str]:
    """The ids of batches to be fed or cancelled, oldest first."""
    found: Any = connection.zrange(BATCHES_KEY, 0, -1)
    return [str_if_bytes(batch_id) for batch_id in found]


def _packed(row: Row) -> bytes:
    document = [row.custom_id, row.digest, row.request.to_wire()]
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


def _unpacked(number: int, packed: bytes) -> Row | BadRow:
    try:
        custom_id, digest, request = json.loads(zlib.decompress(packed))
    except (zlib.error, ValueError, TypeError) as error:
        reason = one_line(f"row {number}: Redis holds no row there ({error}); submit it again")
        return BadRow(number, None, "unparsable", reason, digest_of(None, reason), False)
    try:
        return Row(custom_id, number, GenerationRequest.parse(request), digest)
    except InvalidRequest as error:
        # Another version may have uploaded it.
        return BadRow(number, custom_id, "invalid_request", str(error), digest, True)
