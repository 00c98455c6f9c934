"""A detached batch: a queue in Redis from which workers take rows, its results and its state.

A row that waits costs its body: it is an entry of a list of its queue, made at the upload. A worker
that takes it makes a job of it, in the script that claims (claim.lua), and moves the entry to a
hash of rows that run. The script that ends the job (commit.lua) writes the row's output line under
its number, counts it, and closes the batch with its last row. A worker's sweep finds rows whose
jobs were deleted, or ended by other tools (mend.lua). So a batch needs nothing but workers.

The rows of a run are such batches, one after the other; see `omlx_producer.bulk.collector`.

Of two open batches for one queue, the one that was served, or came, less recently goes first.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import math
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import redis
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, computed_field
from redis.client import Pipeline
from redis.exceptions import RedisError, WatchError
from redis.utils import str_if_bytes
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.serializers import JSONSerializer
from rq.utils import utcformat

from omlx_producer.bulk.plan import BUFFER_ROWS, BUFFER_SIZE, arrange
from omlx_producer.bulk.row import CANCELLED, BadRow, Row, RowResult, RowUsage, write_line
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.connection import server_time
from omlx_producer.errors import JobCancelled, MalformedResult, UnknownJob
from omlx_producer.lua import load
from omlx_producer.wire import (
    WIRE_FIELD,
    Priority,
    queue_name,
    read_queue_name,
    row_job_id,
    wake_channel,
)
from omlx_producer.wire.keys import (
    BATCHES_ENDED_KEY,
    BATCHES_KEY,
    batch_key,
    batch_results_key,
    batch_running_key,
    batch_waiting_key,
    read_version,
)

# Until an upload expires, after its last write.
UPLOAD_SECONDS = 3600
# An upload that runs renews its expiry more often.
ALIVE_SECONDS = 15
ROWS_AT_ONCE = 200
OVER = ("done", "expired", "cancelled", "failed")
_STATUSES = {"uploading": "validating", "open": "in_progress", "done": "completed"}


def is_batch_id(text: str) -> bool:
    """Whether it is the id of a batch, in the form of commands or that of OpenAI's interface."""
    return re.fullmatch(r"batch[-_][0-9a-f]{12}", text) is not None


class BatchState(BaseModel):
    """A batch at one moment.

    Attributes:
        state: uploading, open, cancelling, cancelled, expired or done. A batch over HTTP is failed
            if its input is wrong. A batch in a list is broken if its hash cannot be read.
        failures: rows without an answer, by code; ``cancelled`` are those that were stopped.
        failed: how many rows failed, without those that its cancel stopped.
        left: rows without a result. During an upload 0, or over HTTP the rows of the input.
        queues: of its rows.
        home: whether it is one of a run, whose command takes the results.
        created_at, ended_at: in seconds since 1970.
        fetched_at, fetched_to: when its results left Redis, and for which file.

    >>> state = producer.batch(["def f(x):"]).wait()
    >>> state.rows, state.ok, state.failed, state.over
    (1, 1, 0, True)
    """

    model_config = ConfigDict(frozen=True)

    id: str
    state: str = ""
    rows: int = 0
    ok: int = 0
    failures: dict[str, int] = {}
    left: int = 0
    usage: RowUsage = RowUsage()
    queues: tuple[str, ...] = Field((), exclude=True)
    home: bool = Field(False, exclude=True)
    created_at: FiniteFloat
    ended_at: FiniteFloat | None = None
    fetched_at: FiniteFloat | None = None
    fetched_to: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def failed(self) -> int:
        is_cancelled = self.state in ("cancelling", "cancelled")
        stopped = self.failures.get(CANCELLED, 0) if is_cancelled else 0
        return self.errors - stopped

    @property
    def errors(self) -> int:
        """How many rows have the output line of an error."""
        return sum(self.failures.values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def status(self) -> str:
        """OpenAI's name of its state."""
        return _STATUSES.get(self.state, self.state)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def models(self) -> list[str]:
        """The aliases that its rows name."""
        return sorted({found[0] for queue in self.queues if (found := read_queue_name(queue))})

    @classmethod
    def of(cls, batch_id: str, found: Mapping[str, str]) -> BatchState:
        """Read the fields of its hash in Redis.

        Raises:
            MalformedResult: if a field is missing or broken.
        """
        failures = {
            name.removeprefix("failed:"): value
            for name, value in sorted(found.items())
            if name.startswith("failed:")
        }
        parts = {"id": batch_id, "failures": failures, "usage": found}
        queues = found.get("queues", "").split()
        try:
            state = cls.model_validate({**found, **parts, "queues": queues})
        except ValidationError as error:
            where = error.errors()[0]["loc"]
            name = f"failed:{where[1]}" if where[0] == "failures" else str(where[-1])
            raise MalformedResult(
                batch_id,
                f"{batch_id}: {name}: got {found.get(name, '')!r:.60} in Redis; set a number, or "
                "delete the batch",
            ) from None
        return state

    @classmethod
    def of_any(cls, batch_id: str, found: Mapping[str, str]) -> BatchState:
        """The same, but ``broken`` if a field is missing or broken."""
        try:
            return cls.of(batch_id, found)
        except MalformedResult:
            broken = {"state": "broken", "created_at": str(time.time())}
            return cls.of(batch_id, broken | {"queues": found.get("queues", "")})


class EndedRows(NamedTuple):
    """The rows of a batch that have ended.

    Attributes:
        names: of rows whose results nobody has taken.
        state: of the batch; empty if it is not there.
        cancelled_by: who has cancelled it; empty if nobody did.
    """

    names: list[str]
    state: str
    cancelled_by: str


@dataclass(frozen=True)
class Batch:
    """One batch, by its keys.

    Attributes:
        id: ``batch-`` and 12 digits; ``batch_``, as the gateway has it, stands for the same.
    """

    connection: redis.Redis = field(repr=False)
    id: str

    def __post_init__(self) -> None:
        if is_batch_id(self.id):
            object.__setattr__(self, "id", self.id.replace("_", "-"))

    @classmethod
    def create(cls, connection: redis.Redis, **fields: Any) -> Batch:
        """Make a batch with a new id; see `begin`."""
        batch = cls.of_run(connection, secrets.token_hex(6))
        batch.begin(fields)
        return batch

    def begin(self, fields: Mapping[str, Any]) -> str:
        """Make a batch with this id; fill it with `upload`.

        Args:
            fields: of its hash in Redis.

        Returns:
            When it was made; an upload that takes its place has another time. Empty if there is a
            batch with this id, which stays as it is. Only a killed upload is replaced.
        """
        now = str(server_time(self.connection))
        args: list[Any] = [now, UPLOAD_SECONDS, ALIVE_SECONDS]
        usual = {"priority": "bulk", "job_timeout": JOB_SECONDS}
        for each in (usual | dict(fields)).items():
            args += each
        return now if self._script("begin", *args) else ""

    def fail(self, begun: str, errors: str) -> None:
        """End a batch whose input is wrong, before its upload has ended.

        Args:
            begun: when it was made, see `begin`.
            errors: what is wrong with it, as JSON.
        """
        self._script("open", begun, 0, errors)

    def _script(self, name: str, *args: Any) -> Any:
        """The answer of a script about this batch."""
        with_run = (self.run, *args)
        return load(self.connection, name)(args=with_run)

    @property
    def run(self) -> str:
        """Its id in keys and in the ids of its jobs, see `row_job_id`."""
        return self.id.removeprefix("batch-")

    @property
    def key(self) -> str:
        return batch_key(self.run)

    @property
    def results_key(self) -> str:
        """A hash: output lines by the name of the row, compressed or not."""
        return batch_results_key(self.run)

    def waiting_key(self, queue: str) -> str:
        """A list: rows that have no job yet, in the order in which they are taken."""
        return batch_waiting_key(self.run, queue)

    def running_key(self, queue: str) -> str:
        """A hash: rows that have a job, by name."""
        return batch_running_key(self.run, queue)

    def upload(self, rows: Iterable[Row | BadRow], begun: str | None = None) -> int:
        """Fill a new batch and open it to workers; returns how many rows it has.

        Rows are numbered from 1. None runs before the end of the upload. What a killed upload
        leaves behind expires.

        Args:
            begun: when the batch was made, see `begin`; None for as it is.

        Raises:
            UnknownJob: if the batch has expired meanwhile, or another upload has its place; no row
                runs.
            JobCancelled: if it was cancelled.
        """
        count, queues = 0, dict[str, None]()
        stored: Any = self.connection.hmget(self.key, "priority", "created_at")
        priority: Any = str_if_bytes(stored[0] or "bulk")
        created_at = begun or str_if_bytes(stored[1] or "")
        with self._kept(queues):
            for entries in _in_chunks(rows):
                for _, row in entries:
                    if isinstance(row, Row):
                        queues[queue_name(row.request.model, priority)] = None
                count = self._write(entries, count, priority, queues, created_at)
        self._require_uploaded(self._script("open", created_at, count, "", *queues))
        self._ring(queues, count)
        return count

    def _ring(self, queues: Iterable[str], rows: int) -> None:
        """Make the queues known, and wake their workers."""
        for queue in queues:
            self.connection.sadd(
                Queue.redis_queues_keys, f"{Queue.redis_queue_namespace_prefix}{queue}"
            )
            if found := read_queue_name(queue):
                self.connection.publish(wake_channel(found[0]), rows)

    def _require_uploaded(self, state: Any) -> None:
        """Check that the batch of an upload is still its own, and was not cancelled."""
        if state in (None, b"failed"):
            raise UnknownJob(
                f"{self.id}: was deleted during its upload, or the upload made no progress for too "
                "long and has expired; run it again"
            )
        if state.startswith(b"cancel"):
            raise JobCancelled(self.id, "the batch was cancelled during its upload")

    @contextlib.contextmanager
    def _kept(self, queues: Iterable[str]) -> Iterator[None]:
        """Keep the upload from expiring, from its own thread: reading a row from a pipe may block
        for hours."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(min(UPLOAD_SECONDS, ALIVE_SECONDS) / 4):
                # The upload itself meets an outage.
                with contextlib.suppress(RedisError), self.connection.pipeline() as pipe:
                    self._expire(pipe, list(queues), gt=True)
                    pipe.execute()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def is_kept(self) -> bool:
        """Whether its upload is still running."""
        return self.connection.ttl(self.key) > UPLOAD_SECONDS - ALIVE_SECONDS

    def _write(
        self,
        entries: list[tuple[int, Row | BadRow]],
        count: int,
        priority: Priority,
        queues: Iterable[str],
        created_at: str,
    ) -> int:
        """Add numbered rows to ``count`` others; returns how many there are then.

        redis-py repeats a transaction whose answer was lost. A watched one raises WatchError
        instead, and the stored number of rows says whether it has worked.
        """
        end, now = count + len(entries), server_time(self.connection)
        # Before the key is watched, since pictures may take longer than from one renewal of its
        # expiry to the next, and each ends the watch.
        packed = [_packed(str(number), row, now) for number, row in entries]
        while True:
            with self.connection.pipeline() as pipe, contextlib.suppress(WatchError):
                pipe.watch(self.key)  # type: ignore[no-untyped-call]
                fields = ("created_at", "state", "rows", WIRE_FIELD, "window")
                found: Any = pipe.hmget(self.key, *fields)
                self._require_uploaded(found[1] if found[0] == created_at.encode() else None)
                if int(found[2] or 0) == end:
                    return end
                pipe.multi()
                for (number, row), stored in zip(entries, packed, strict=True):
                    if isinstance(row, BadRow):
                        pipe.hset(self.results_key, str(number), stored)
                        pipe.hincrby(self.key, f"failed:{row.code}", 1)
                    else:
                        queue = queue_name(row.request.model, priority)
                        pipe.rpush(self.waiting_key(queue), stored)
                uploaded = [row for _, row in entries]
                version = max(read_version(found[3]), _version_of(uploaded))
                window = _window(found[4], uploaded)
                pipe.hset(self.key, mapping={WIRE_FIELD: version, "window": window})
                pipe.hset(self.key, mapping={"rows": end, "queues": " ".join(queues)})
                self._expire(pipe, queues)
                pipe.execute()
                return end

    def _expire(self, pipe: Pipeline, queues: Iterable[str], *, gt: bool = False) -> None:
        for key in (self.key, self.results_key, *map(self.waiting_key, queues)):
            pipe.expire(key, UPLOAD_SECONDS, gt=gt)

    # A batch of a run

    @classmethod
    def of_run(cls, connection: redis.Redis, run: str) -> Batch:
        """The batch with this id in keys: for one of a run, the id of the run and four digits."""
        return cls(connection, f"batch-{run}")

    def unfinished(self, queues: Iterable[str]) -> dict[str, str]:
        """The digests of the rows that have no result, by name."""
        found = list(map(str_if_bytes, self._script("rows", *queues)))
        return dict(zip(found[::2], found[1::2], strict=True))

    def take_back(self, queues: Iterable[str]) -> list[str]:
        """Take out the rows that wait; returns the names of those that run."""
        return [str_if_bytes(name) for name in self._script("cancel", "", *queues) or ()]

    def delete(self, queues: Iterable[str], *, tell: bool = False) -> None:
        """Delete it with the jobs of its rows.

        Args:
            tell: whether the command of a run is to find who has cancelled it.
        """
        self._script("delete", int(tell), *queues)

    def note(self, **fields: str | float) -> None:
        """Write fields of its hash, if it is still there."""
        self._script("note", *itertools.chain(*fields.items()))

    def ended(self) -> EndedRows:
        """The rows that have ended, and who has cancelled it."""
        with self.connection.pipeline(transaction=False) as pipe:
            pipe.hkeys(self.results_key)
            pipe.hmget(self.key, "state", "cancelled_by")
            names, (state, by) = pipe.execute()
        return EndedRows([str_if_bytes(name) for name in names], _text(state), _text(by))

    def stored(self, names: Sequence[str]) -> dict[str, bytes]:
        """The output lines of these rows, of those that have one."""
        if not names:
            return {}
        lines: Any = self.connection.hmget(self.results_key, list(names))
        return {
            name: _line(line) for name, line in zip(names, lines, strict=True) if line is not None
        }

    def acknowledge(self, names: Sequence[str]) -> None:
        """Drop results that are durable elsewhere. Safe to repeat."""
        if names:
            self.connection.hdel(self.results_key, *names)

    def results(self, state: BatchState) -> Iterator[bytes]:
        """The output lines so far, in the order of the input.

        Args:
            state: of the batch, read before.

        Raises, after the last line:
            UnknownJob: if some of the rows that have ended by then have no line.
        """
        missing = state.ok + state.errors
        for start in range(1, state.rows + 1, ROWS_AT_ONCE):
            numbers = [str(n) for n in range(start, min(start + ROWS_AT_ONCE, state.rows + 1))]
            packed: Any = self.connection.hmget(self.results_key, numbers)
            lines = [_line(line) for line in packed if line is not None]
            missing -= len(lines)
            yield from lines
        if missing > 0:
            raise UnknownJob(
                f"{self.id}: {missing} of {state.ok + state.errors} results are not in Redis any "
                f"more: they were fetched meanwhile, have expired or were deleted; see: "
                f"omlx-submit status {self.id}"
            )

    def drop_results(self, fetched_to: str) -> None:
        """Drop the results of a batch that is over and whose results are durable elsewhere.

        Those of a batch over HTTP stay until they expire, for the client who made it.

        Args:
            fetched_to: where they are, for whoever asks for them again.
        """
        if self.connection.hexists(self.key, "input_file_id"):
            return
        self.note(fetched_at=server_time(self.connection), fetched_to=fetched_to)
        self.connection.unlink(self.results_key)

    def fields(self) -> dict[str, str]:
        """Its hash; empty if it does not exist."""
        found = _decoded(self.connection.hgetall(self.key)) if is_batch_id(self.id) else {}
        return found if "created_at" in found else {}

    def read(self, *, broken: bool = False) -> BatchState:
        """Read the state of the batch.

        Args:
            broken: whether a hash that cannot be read gives the state ``broken``, not an error.

        Raises:
            UnknownJob: if it does not exist.
            MalformedResult: if a field of its hash is missing or broken.
        """
        found = self.fields()
        if not found:
            raise UnknownJob(f"no batch has the id {self.id!r}: check the id, or it has expired")
        return (BatchState.of_any if broken else BatchState.of)(self.id, found)

    def cancel(self) -> bool:
        """Drop the rows that wait, and stop those that run. Results so far are kept.

        The batch is over when its last running row has ended, or at once if its upload has not
        ended. The command of a run ends as if it was interrupted. Returns False if it is over
        already.
        """
        queues = self.read(broken=True).queues
        found = self._script("cancel", _this_user(), *queues)
        if found is None:
            return False
        for number in found:
            job_id = row_job_id(self.run, str_if_bytes(number))
            # One that has ended, or waits again, needs no command.
            with contextlib.suppress(InvalidJobOperation, NoSuchJobError):
                send_stop_job_command(self.connection, job_id, serializer=JSONSerializer)
        return True


def _this_user() -> str:
    """The user and machine that cancel, for the message to whoever waits."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def read_batches(connection: redis.Redis, runs: Iterable[Any]) -> list[BatchState]:
    """The states of these batches, without those that have expired.

    That of one whose hash cannot be read is ``broken``.
    """
    names, states = list(dict.fromkeys(map(str_if_bytes, runs))), []
    for start in range(0, len(names), ROWS_AT_ONCE):
        batches = [Batch.of_run(connection, run) for run in names[start : start + ROWS_AT_ONCE]]
        with connection.pipeline(transaction=False) as pipe:
            for batch in batches:
                pipe.hgetall(batch.key)
            found = [_decoded(raw) for raw in pipe.execute()]
        states += [
            BatchState.of_any(batch.id, fields)
            for batch, fields in zip(batches, found, strict=True)
            if "created_at" in fields
        ]
    return states


def run_batches(connection: redis.Redis, run: str) -> list[BatchState]:
    """The batches of a run that are open, or ended in the last seven days."""
    found = [*_names(connection, BATCHES_KEY, run), *_names(connection, BATCHES_ENDED_KEY, run)]
    return [state for state in read_batches(connection, found) if state.home]


def latest_version(connection: redis.Redis, run: str) -> int:
    """The latest wire version of the open batches whose ids begin like this."""
    with connection.pipeline(transaction=False) as pipe:
        for name in _names(connection, BATCHES_KEY, run):
            pipe.hget(batch_key(name), WIRE_FIELD)
        return max(map(read_version, pipe.execute()), default=1)


def _names(connection: redis.Redis, key: str, run: str) -> list[str]:
    """The members of a sorted set of batches that begin like this."""
    return [str_if_bytes(name) for name, _ in connection.zscan_iter(key, f"{run}*", count=1000)]


def _decoded(raw: Any) -> dict[str, str]:
    return {str_if_bytes(name): str_if_bytes(value) for name, value in raw.items()}


def _in_chunks(rows: Iterable[Row | BadRow]) -> Iterator[list[tuple[int, Row | BadRow]]]:
    """Numbered rows to be written together; see `omlx_producer.bulk.plan` for their order."""
    good, bad, held = list[Row](), list[tuple[int, Row | BadRow]](), 0

    def chunks() -> Iterator[list[tuple[int, Row | BadRow]]]:
        ordered = [*bad, *((row.line, row) for row in arrange(good))]
        for start in range(0, len(ordered), ROWS_AT_ONCE):
            yield ordered[start : start + ROWS_AT_ONCE]

    for number, row in enumerate(rows, 1):
        if isinstance(row, BadRow):
            bad.append((number, row))
        else:
            good.append(replace(row, line=number))
            held += row.held
        if len(good) + len(bad) >= BUFFER_ROWS or held >= BUFFER_SIZE:
            yield from chunks()
            good, bad, held = [], [], 0
    yield from chunks()


def _version_of(rows: Iterable[Row | BadRow]) -> int:
    """The latest wire version of rows."""
    return max((row.request.wire_version for row in rows if isinstance(row, Row)), default=1)


def _window(stored: bytes | None, rows: Iterable[Row | BadRow]) -> float:
    """The seconds after which all rows of a batch have expired; infinite if some never do.

    Args:
        stored: those of the rows that it has.
    """
    windows = [row.request.window_seconds for row in rows if isinstance(row, Row)]
    return max(float(stored or 0), *(math.inf if each is None else each for each in windows), 0)


def _packed(name: str, row: Row | BadRow, now: float) -> bytes:
    """A waiting row: name, digest, time and custom_id in a line, then its job's payload for RQ; of
    one that never runs its output line, compressed."""
    if isinstance(row, BadRow):
        return zlib.compress(write_line(RowResult.of_bad(row)))
    created = utcformat(datetime.fromtimestamp(now, UTC))
    header = f"{name} {row.digest} {created} {json.dumps(row.custom_id)}\n"
    return header.encode() + row.request.to_payload()


def _text(stored: bytes | None) -> str:
    return str_if_bytes(stored or "")


def _line(stored: bytes) -> bytes:
    """An output line; one that a script has written is not compressed."""
    return stored if stored.startswith(b"{") else zlib.decompress(stored)
