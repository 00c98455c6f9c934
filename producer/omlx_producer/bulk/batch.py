"""A detached batch: a queue in Redis from which workers take rows, its results and its state.

A row that waits costs its body: it is an entry of a list of its queue, made at the upload. A worker
that takes it makes a job of it, in the script that claims (claim.lua), and moves the entry to a
hash of rows that run. The script that ends the job (commit.lua) writes the row's output line under
its number, counts it, and closes the batch with its last row. A worker's sweep finds rows whose
jobs were deleted, or ended by other tools (sweep.lua). So a batch needs nothing but workers.

Of two open batches for one queue, the one that was served less recently goes first.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import RedisError, WatchError
from redis.utils import str_if_bytes
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import utcformat

from omlx_producer.bulk.ordering import BUFFER_CHARACTERS, BUFFER_ROWS, arrange
from omlx_producer.bulk.row import BadRow, Row, RowResult, RowUsage, write_line
from omlx_producer.bulk.runfile import new_run_id
from omlx_producer.cancel import STOP_FIELD
from omlx_producer.enqueue import JOB_SECONDS
from omlx_producer.errors import UnknownJob
from omlx_producer.protocol import (
    JOB_FUNCTION,
    Priority,
    queue_name,
    read_queue_name,
    row_job_id,
    wake_channel,
)
from omlx_producer.workers import server_time

BATCHES_KEY = "omlx:batches"
"""Open batches by the time of their upload. `open_key` has those with rows that wait."""
# After the end of a batch, and after the last write of an upload.
KEEP_SECONDS = 7 * 24 * 3600
UPLOAD_SECONDS = 3600
ROWS_AT_ONCE = 200
OVER = ("done", "cancelled")

# A hash without `created_at` is what a late write made of an expired batch.
_OPEN = """
if redis.call('HEXISTS', KEYS[1], 'created_at') == 0 then return 0 end
if redis.call('HGET', KEYS[1], 'state') ~= 'uploading' then return 1 end
local waiting = 0
for i = 3, #KEYS, 2 do waiting = waiting + redis.call('LLEN', KEYS[i]) end
redis.call('HSET', KEYS[1], 'rows', ARGV[1], 'left', waiting, 'keep_seconds', ARGV[4])
if waiting == 0 then
  redis.call('HSET', KEYS[1], 'state', 'done', 'ended_at', ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  redis.call('EXPIRE', KEYS[1] .. ':results', ARGV[4])
  return 1
end
redis.call('HSET', KEYS[1], 'state', 'open')
redis.call('PERSIST', KEYS[1])
redis.call('PERSIST', KEYS[1] .. ':results')
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[3])
for i = 3, #KEYS, 2 do
  redis.call('PERSIST', KEYS[i])
  redis.call('ZADD', KEYS[i + 1], 0, ARGV[3])
end
return 1
"""

# Rows that wait are dropped. Rows with jobs end as they are stopped.
_CANCEL = """
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'open' and state ~= 'cancelling' then return false end
local running = {}
for i = 3, #KEYS, 3 do
  redis.call('DEL', KEYS[i])
  redis.call('ZREM', KEYS[i + 1], ARGV[1])
  for _, row in ipairs(redis.call('HKEYS', KEYS[i + 2])) do
    running[#running + 1] = row
    local job = ARGV[3] .. 'row-' .. ARGV[1] .. '-' .. row
    if redis.call('EXISTS', job) == 1 then redis.call('HSET', job, ARGV[4], 1) end
  end
end
redis.call('HSET', KEYS[1], 'left', #running, 'state', 'cancelling')
if #running == 0 then
  redis.call('HSET', KEYS[1], 'state', 'cancelled', 'ended_at', ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[1] .. ':results', ARGV[5])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return running
"""


def is_batch_id(text: str) -> bool:
    return re.fullmatch(r"batch-[0-9a-f]{12}", text) is not None


@dataclass(frozen=True)
class BatchState:
    """A batch at one moment.

    Attributes:
        state: uploading, open, cancelling, cancelled or done.
        failures: failed rows by code.
        left: rows without a result; 0 while it is uploaded.
        queues: of its rows.
    """

    id: str
    state: str
    rows: int
    ok: int
    failures: dict[str, int]
    left: int
    usage: RowUsage
    queues: tuple[str, ...]
    created_at: float
    ended_at: float | None

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, in JSON's types."""
        found = asdict(self) | asdict(self.usage)
        return {name: value for name, value in found.items() if name not in ("usage", "queues")}

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def models(self) -> list[str]:
        """The aliases that its rows name."""
        return sorted({found[0] for queue in self.queues if (found := read_queue_name(queue))})

    @classmethod
    def of(cls, batch_id: str, found: Mapping[str, str]) -> BatchState:
        """Read the fields of its hash in Redis.

        Raises:
            KeyError, ValueError: if a field is missing or broken.
        """

        def number(name: str) -> int:
            return int(found.get(name, 0))

        return cls(
            id=batch_id,
            state=found["state"],
            rows=number("rows"),
            ok=number("ok"),
            failures={
                name.removeprefix("failed:"): int(value)
                for name, value in sorted(found.items())
                if name.startswith("failed:")
            },
            left=number("left"),
            usage=RowUsage(*(number(each.name) for each in fields(RowUsage))),
            queues=tuple(found.get("queues", "").split()),
            created_at=float(found["created_at"]),
            ended_at=float(found["ended_at"]) if "ended_at" in found else None,
        )


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
        job_timeout: int = JOB_SECONDS,
    ) -> Batch:
        """Make a new batch; fill it with `upload`."""
        batch = cls(connection, f"batch-{new_run_id()}")
        now = server_time(connection)
        created: dict[Any, Any] = {
            "state": "uploading",
            "priority": priority,
            "job_timeout": job_timeout,
            "created_at": now,
            "created": utcformat(datetime.fromtimestamp(now, UTC)),
        }
        with connection.pipeline() as pipe:
            pipe.hset(batch.key, mapping=created)
            pipe.expire(batch.key, UPLOAD_SECONDS)
            pipe.execute()
        return batch

    @property
    def run(self) -> str:
        """Its id in keys and in the ids of its jobs, see `row_job_id`."""
        return self.id.removeprefix("batch-")

    @property
    def key(self) -> str:
        return f"omlx:batch:{self.run}"

    @property
    def results_key(self) -> str:
        """A hash: compressed output lines by row number."""
        return f"{self.key}:results"

    def waiting_key(self, queue: str) -> str:
        """A list: rows that have no job yet, in the order in which they are taken."""
        return f"{self.key}:waiting:{queue}"

    def running_key(self, queue: str) -> str:
        """A hash: rows that have a job, by number."""
        return f"{self.key}:running:{queue}"

    def upload(self, rows: Iterable[Row | BadRow]) -> int:
        """Fill a new batch and open it to workers; returns how many rows it has.

        Rows are numbered from 1. None runs before the end of the upload. What a killed upload
        leaves behind expires.

        Raises:
            UnknownJob: if the batch has expired meanwhile; no row runs.
        """
        count, queues = 0, dict[str, None]()
        priority: Any = str_if_bytes(self.connection.hget(self.key, "priority") or "bulk")
        with self._kept(queues):
            for entries in _in_chunks(rows):
                for _, row in entries:
                    if isinstance(row, Row):
                        queues[queue_name(row.request.model, priority)] = None
                count = self._write(entries, count, priority, queues)
        keys = [self.key, BATCHES_KEY]
        for queue in queues:
            keys += [self.waiting_key(queue), open_key(queue)]
        opened = self.connection.register_script(_OPEN)
        now = server_time(self.connection)
        if not opened(keys=keys, args=[count, now, self.run, KEEP_SECONDS]):
            raise UnknownJob(
                f"{self.id}: the upload made no progress for too long and has expired; run it again"
            )
        for queue in queues:
            if found := read_queue_name(queue):
                self.connection.publish(wake_channel(found[0]), self.id)
        return count

    @contextlib.contextmanager
    def _kept(self, queues: Iterable[str]) -> Iterator[None]:
        """Keep the upload from expiring, from its own thread: reading a row from a pipe may block
        for hours."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(UPLOAD_SECONDS / 4):
                # The upload itself meets an outage.
                with contextlib.suppress(RedisError), self.connection.pipeline() as pipe:
                    self._expire(pipe, list(queues))
                    pipe.execute()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _write(
        self,
        entries: list[tuple[int, Row | BadRow]],
        count: int,
        priority: Priority,
        queues: Iterable[str],
    ) -> int:
        """Add numbered rows to ``count`` others; returns how many there are then.

        redis-py repeats a transaction whose answer was lost. A watched one raises WatchError
        instead, and the stored number of rows says whether it has worked.
        """
        end = count + len(entries)
        while True:
            with self.connection.pipeline() as pipe, contextlib.suppress(WatchError):
                pipe.watch(self.key)  # type: ignore[no-untyped-call]
                if int(pipe.hget(self.key, "rows") or 0) == end:
                    return end
                pipe.multi()
                for number, row in entries:
                    if isinstance(row, BadRow):
                        line = write_line(RowResult.of_bad(row))
                        pipe.hset(self.results_key, str(number), zlib.compress(line))
                        pipe.hincrby(self.key, f"failed:{row.code}", 1)
                    else:
                        queue = queue_name(row.request.model, priority)
                        pipe.rpush(self.waiting_key(queue), _packed(number, row))
                pipe.hset(self.key, mapping={"rows": end, "queues": " ".join(queues)})
                self._expire(pipe, queues)
                pipe.execute()
                return end

    def _expire(self, pipe: Pipeline, queues: Iterable[str]) -> None:
        for key in (self.key, self.results_key, *map(self.waiting_key, queues)):
            pipe.expire(key, UPLOAD_SECONDS)

    def results(self, rows: int) -> Iterator[bytes]:
        """The output lines so far, in the order of the input."""
        for start in range(1, rows + 1, ROWS_AT_ONCE):
            numbers = [str(n) for n in range(start, min(start + ROWS_AT_ONCE, rows + 1))]
            packed: Any = self.connection.hmget(self.results_key, numbers)
            yield from (_line(line) for line in packed if line is not None)

    def read(self) -> BatchState:
        """Read the state of the batch.

        Raises:
            UnknownJob: if it does not exist.
        """
        raw: Any = self.connection.hgetall(self.key) if is_batch_id(self.id) else {}
        found = {str_if_bytes(name): str_if_bytes(value) for name, value in raw.items()}
        if "created_at" not in found:
            raise UnknownJob(f"no batch has the id {self.id!r}: check the id, or it has expired")
        return BatchState.of(self.id, found)

    def cancel(self) -> bool:
        """Drop the rows that wait, and stop those that run. Results so far are kept.

        The batch is over when its last running row has ended. Returns False if it is over
        already, or is not uploaded yet.
        """
        state = self.read()
        keys = [self.key, BATCHES_KEY]
        for queue in state.queues:
            keys += [self.waiting_key(queue), open_key(queue), self.running_key(queue)]
        now, jobs = server_time(self.connection), Job.redis_job_namespace_prefix
        script = self.connection.register_script(_CANCEL)
        running = script(keys=keys, args=[self.run, now, jobs, STOP_FIELD, KEEP_SECONDS])
        for number in running or ():
            job_id = row_job_id(self.run, str_if_bytes(number))
            # One that has ended, or waits again, needs no command.
            with contextlib.suppress(InvalidJobOperation, NoSuchJobError):
                send_stop_job_command(self.connection, job_id, serializer=JSONSerializer)
        return running is not None


def open_key(queue: str) -> str:
    """The batches that have rows waiting for a queue, by when they were served last."""
    return f"{BATCHES_KEY}:{queue}"


def _in_chunks(rows: Iterable[Row | BadRow]) -> Iterator[list[tuple[int, Row | BadRow]]]:
    """Numbered rows to be written together; see `omlx_producer.bulk.ordering` for their order."""
    good, bad, characters = list[Row](), list[tuple[int, Row | BadRow]](), 0

    def chunks() -> Iterator[list[tuple[int, Row | BadRow]]]:
        ordered = [*bad, *((row.line, row) for row in arrange(good))]
        for start in range(0, len(ordered), ROWS_AT_ONCE):
            yield ordered[start : start + ROWS_AT_ONCE]

    for number, row in enumerate(rows, 1):
        if isinstance(row, BadRow):
            bad.append((number, row))
        else:
            good.append(replace(row, line=number))
            characters += row.characters
        if len(good) + len(bad) >= BUFFER_ROWS or characters >= BUFFER_CHARACTERS:
            yield from chunks()
            good, bad, characters = [], [], 0
    yield from chunks()


def _packed(number: int, row: Row) -> bytes:
    """A waiting row: number, digest and custom_id in a line, then its job's payload for RQ."""
    header = f"{number} {row.digest} {json.dumps(row.custom_id)}\n"
    payload = json.dumps([JOB_FUNCTION, None, [], {"request": row.request.to_wire()}])
    return header.encode() + zlib.compress(payload.encode())


def _line(stored: bytes) -> bytes:
    """An output line; one that a script has written is not compressed."""
    return stored if stored.startswith(b"{") else zlib.decompress(stored)
