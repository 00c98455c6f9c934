"""Iterators over the tokens of a job: each token once, in order, from any cursor.

A consumer may attach before, during or after the job, be slow, or lose its connection. All streams
of one client share a reader, which follows their jobs' streams with one blocking XREAD. It looks at
a job's status when it begins to follow it, after a lost connection, and after a silence: other
tools end jobs without an event.

Each event says where its tokens and its text begin in their choice, and has a digest of the
choice's tokens. So what comes twice is cut off, and what was written anew is never mixed with what
was had: a killed server may lose the end of a stream, which workers then write again, maybe in
other events.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn, Self

import redis
import redis.asyncio
from pydantic import ValidationError
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from omlx_producer.client.outcome import (
    ENDINGS,
    WAITING,
    Outcome,
    ask_result,
    read_outcome,
    require_job_id,
    unknown_job,
)
from omlx_producer.connection import block_seconds, connect, connect_async, require_bytes
from omlx_producer.errors import InvalidRequest, OmlxQueueError, TokensLost
from omlx_producer.outage import RECONNECT_SECONDS, Reconnection, broken
from omlx_producer.wire import events_key
from omlx_producer.wire.events import (
    ChoiceDelta,
    DoneEvent,
    JobEvent,
    TokensEvent,
    parse_event,
    token_digest,
)

IDLE_SECONDS = 5.0
# A job that was requeued still has the stream of its earlier run, until a worker claims it.
REQUEUED_SECONDS = 0.25
PAGE = 500
_LOOKS = 100
_WAKE_SECONDS = 60
_PAUSE_SECONDS = 0.02
_MOST_TOKENS = 2**63 - 1
"""A stream's ids, which count tokens, are numbers of 64 bits."""

Entries = Iterable[tuple[bytes, dict[bytes, bytes]]]
Item = bytes | Outcome | Exception


class TokenStream:
    """An iterator over the events of a job. It ends after the terminal event.

    Args:
        connection: a Redis client, or a URL. Streams of one client share a connection.
        cursor: the ``n`` of the last event that the consumer has had. If Redis has since lost its
            last writes, a cursor of a job with several choices may stand for other tokens; 0 is
            always exact.
        reconnect_for: seconds without Redis after which iterating raises redis-py's error. It is
            raised at once if the server has never answered.

    Attributes:
        cursor: the ``n`` of the last event read.

    Raises, while iterating:
        UnknownJob: if the job does not exist, or has expired.
        TokensLost: if the stream has lost tokens after the cursor, or holds others before it.

    >>> job = producer.submit(prompt="def f(x):")
    >>> with TokenStream(producer.connection, job.id) as stream:
    ...     first = next(stream)
    >>> later = list(job.stream(stream.cursor))
    """

    def __init__(
        self,
        connection: redis.Redis | str,
        job_id: str,
        cursor: int = 0,
        *,
        reconnect_for: float = RECONNECT_SECONDS,
    ) -> None:
        self._connection = connect(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        require_bytes(self._connection)
        self.cursor = cursor
        # A generator with a reference to this object would keep it and its reader alive.
        delivered = Delivered(job_id, cursor)
        self._events = _follow(self._connection, delivered, Reconnection(reconnect_for))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> JobEvent:
        event = next(self._events)
        self.cursor = event.n
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop following the job. Close the client if it was made from a URL."""
        self._events.close()
        if self._owned:
            self._connection.close()


class AsyncTokenStream:
    """The form of `TokenStream` for ``async for``.

    >>> async def count(url: str, job_id: str) -> int:
    ...     async with AsyncTokenStream(url, job_id) as stream:
    ...         return len([event async for event in stream])
    >>> job = producer.submit(prompt="def f(x):")
    >>> asyncio.run(count(redis_url, job.id)) == len(list(job.stream()))
    True
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis | str,
        job_id: str,
        cursor: int = 0,
        *,
        reconnect_for: float = RECONNECT_SECONDS,
    ) -> None:
        self._connection = connect_async(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        require_bytes(self._connection)
        self.cursor = cursor
        delivered = Delivered(job_id, cursor)
        self._events = _follow_async(self._connection, delivered, Reconnection(reconnect_for))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent:
        event = await anext(self._events)
        self.cursor = event.n
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following the job. Close the client if it was made from a URL."""
        await self._events.aclose()
        if self._owned:
            await self._connection.aclose()


def _follow(
    connection: redis.Redis, delivered: Delivered, outage: Reconnection
) -> Generator[JobEvent]:
    while not delivered.over:
        follow = Follow(delivered.job_id, delivered.base, SimpleQueue[Item](), outage)
        reader = Reader.join(connection, follow)
        try:
            reader.wake()
            while not delivered.over:
                item = follow.inbox.get()
                if follow.full and follow.inbox.empty():
                    reader.wake()
                if (event := delivered.take(item)) is not None:
                    yield event
        except _Gap:
            continue
        finally:
            reader.leave(follow)


async def _follow_async(
    connection: redis.asyncio.Redis, delivered: Delivered, outage: Reconnection
) -> AsyncGenerator[JobEvent]:
    while not delivered.over:
        follow = Follow(delivered.job_id, delivered.base, asyncio.Queue[Item](), outage)
        reader = AsyncReader.join(connection, follow)
        try:
            await reader.wake()
            while not delivered.over:
                item = await follow.inbox.get()
                if follow.full and follow.inbox.empty():
                    await reader.wake()
                if (event := delivered.take(item)) is not None:
                    yield event
        except _Gap:
            continue
        finally:
            await reader.leave(follow)


# What a consumer has had


class _Gap(Exception):
    """The stream has lost something in the middle: read it again from the first cursor."""


@dataclass(slots=True)
class _Choice:
    """Tokens, their digest and characters that a consumer has had, and the place of the last mark.

    The digest is None if it is not known: of tokens before a cursor.
    """

    tokens: int = 0
    text: int = 0
    digest: int | None = 0
    mark: int = -1

    def rest(self, delta: ChoiceDelta) -> ChoiceDelta:
        """What an event adds; the consumer has it then.

        Raises:
            ValueError: if its tokens do not go on from those that were had.
        """
        skip = self.tokens - delta.start
        tokens, text = delta.tokens[skip:], delta.text[self.text - delta.offset :]
        if skip <= len(delta.tokens):
            if self.digest is not None and token_digest(tokens, self.digest) != delta.digest:
                raise ValueError(f"choice {delta.index} differs")
            self.digest = delta.digest
        if skip or self.text > delta.offset:
            delta = ChoiceDelta(
                index=delta.index,
                text=text,
                tokens=tokens,
                start=self.tokens,
                offset=self.text,
                digest=self.digest,
                logprobs=(delta.logprobs or [])[skip:] or None,
                marks=[mark for mark in delta.marks or () if mark > self.mark] or None,
            )
        self.tokens, self.text = self.tokens + len(tokens), self.text + len(text)
        self.mark = max((self.mark, *(delta.marks or ())))
        return delta


class Delivered:
    """What a consumer has had of a job since its first cursor.

    Attributes:
        base: the first cursor.
        over: whether it has had the terminal event.
    """

    def __init__(self, job_id: str, cursor: int) -> None:
        if type(cursor) is not int or not 0 <= cursor <= _MOST_TOKENS:
            raise InvalidRequest(f"cursor: got {cursor!r}; give the n of an event, or 0 to start")
        require_job_id(job_id)
        self.job_id = job_id
        self.base = cursor
        self.over = False
        self._cursor = cursor
        self._choices: dict[int, _Choice] = {}
        self._read_again = False

    def take(self, item: Item) -> JobEvent | None:
        """What an entry of the stream, or the outcome of a job, adds to what was had.

        Raises:
            _Gap: if something before it is missing. It is a TokensLost the second time.
            TokensLost: if the stream holds others than were had, or no event ends at the cursor.
        """
        if isinstance(item, Exception):
            raise item
        event = item.as_event(self._cursor) if isinstance(item, Outcome) else self._parse(item)
        if isinstance(event, TokensEvent):
            return self._add(event)
        if isinstance(event, DoneEvent):
            self._require_whole(event, isinstance(item, Outcome))
        self.over = True
        return event

    def _parse(self, payload: bytes) -> JobEvent:
        with contextlib.suppress(ValidationError):
            event = parse_event(payload)
            if not isinstance(event, TokensEvent) or all(
                delta.digest is not None for delta in event.choices
            ):
                return event
        raise OmlxQueueError(
            f"the stream of job {self.job_id} holds an event that cannot be read; "
            "wait for its result, which has the whole text"
        )

    def _add(self, event: TokensEvent) -> TokensEvent | None:
        if event.since > self._cursor:
            self._miss(event.since)
        for delta in event.choices:
            if delta.index not in self._choices:
                if event.since < self.base:
                    raise self._no_end_of_an_event()
                before = (delta.start, delta.offset, None) if self.base else ()
                self._choices[delta.index] = _Choice(*before)
            had = self._choices[delta.index]
            if delta.start > had.tokens or delta.offset > had.text:
                self._miss(event.since)
        try:
            rest = [self._choices[delta.index].rest(delta) for delta in event.choices]
        except ValueError:
            raise self._rewritten() from None
        self._cursor = max(self._cursor, event.n)
        rest = [delta for delta in rest if delta.text or delta.tokens]
        if not rest:
            return None
        self._read_again = False
        return event if rest == event.choices else event.model_copy(update={"choices": rest})

    def _require_whole(self, event: DoneEvent, from_result: bool) -> None:
        """A finished job has published all of its tokens, or none."""
        # The last text of a choice may have counted as a token.
        if self.base > event.usage.completion_tokens + len(event.finish_reasons):
            raise self._no_end_of_an_event()
        if not self._cursor:
            return
        if self._cursor < event.n:
            self._miss(event.n)
        for delta in event.choices:
            had = self._choices.get(delta.index, None if self.base else _Choice())
            if had is None:
                continue
            if had.tokens < delta.start or had.text < delta.offset:
                self._miss(event.n)
            if (had.tokens, had.text, had.digest) != (delta.start, delta.offset, delta.digest):
                raise self._rewritten()
        tokens = sum(had.tokens for had in self._choices.values())
        if from_result and not self.base and tokens != event.usage.completion_tokens:
            raise self._rewritten()

    def _miss(self, until: int) -> NoReturn:
        if not self._read_again:
            self._read_again = True
            raise _Gap
        raise TokensLost(
            f"tokens {self._cursor + 1} to {until} of job {self.job_id} have left its stream; wait "
            "for its result, which has the whole text",
            until,
        )

    def _no_end_of_an_event(self) -> TokensLost:
        return TokensLost(
            f"no event of job {self.job_id} ends with token {self.base}: it is no event's n, or "
            "Redis has lost tokens that were read; start again from cursor 0",
            0,
        )

    def _rewritten(self) -> TokensLost:
        return TokensLost(
            f"Redis has lost tokens of job {self.job_id} that were read, and the job has written "
            "them again otherwise; start again from cursor 0",
            0,
        )


# What is read for all consumers of a client


@dataclass(eq=False, slots=True)
class Follow:
    """A job that a reader follows for one consumer.

    Attributes:
        inbox: payloads of events, then an outcome or an error; a queue, sync or async.
        after: the id of the last entry read, as numbers.
        look_at: when to look at the job; monotonic seconds.
        listens: whether its stream is followed. It is not while it is that of an earlier run.
        full: whether it is not, because the consumer has yet to take a page.
    """

    job_id: str
    cursor: int
    inbox: Any
    outage: Reconnection
    after: tuple[int, int] = (0, 0)
    look_at: float = 0.0
    listens: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        self.after = (self.cursor, 0)

    def read(self, entries: Entries) -> bool:
        """Hand on the entries after those read before. Returns whether the last one is the end."""
        for entry_id, fields in entries:
            if (found := _numbers(entry_id)) > self.after:
                self.after, self.look_at = found, time.monotonic() + IDLE_SECONDS
                self.inbox.put_nowait(fields.get(b"event", b""))
        return self.after[1] > 0

    def looked(
        self,
        status: bytes | None,
        results: Sequence[Any],
        entries: Sequence[Any],
        last: Sequence[Any],
    ) -> bool:
        """Take the reply to a look. Returns whether nothing more comes.

        Raises:
            UnknownJob: if there is neither a job nor the end of its stream, or no result.
            MalformedResult: see `read_outcome`.
        """
        self.outage.answered()
        ended = bool(last) and _numbers(last[0][0])[1] > 0
        self.listens = not (ended and status in WAITING)
        if not self.listens:
            self.look_at = time.monotonic() + min(REQUEUED_SECONDS, IDLE_SECONDS)
            return False
        self.look_at = time.monotonic() + IDLE_SECONDS
        ending = ENDINGS.get(status.decode()) if status else None
        if entries:
            over = self.read(entries)
            if not ended and (ending or status is None):
                self.look_at = 0.0
            return over
        if ended:
            self.inbox.put_nowait(last[0][1].get(b"event", b""))
        elif status is None:
            raise unknown_job(self.job_id)
        elif ending:
            self.inbox.put_nowait(
                read_outcome(self.job_id, ending, results[0] if results else None)
            )
        return bool(ended or ending)


def _numbers(entry_id: bytes) -> tuple[int, int]:
    tokens, _, part = entry_id.partition(b"-")
    return int(tokens), int(part)


class _Reading:
    """What sync and async readers share: which jobs to read, and who gets what was read.

    Attributes:
        consumers: how many use it.
        listening: whether a read blocks, or is about to. An entry of the reader's own stream ends
            it, so that it goes on with other jobs.
    """

    def __init__(self, block: float) -> None:
        self.follows: set[Follow] = set()
        self.consumers = 0
        self.listening = False
        self._block = block
        self._by_key: dict[bytes, list[Follow]] = {}
        self._own = f"omlx:reader:{secrets.token_hex(8)}".encode()
        self._woken: bytes | str = "0-0"

    def _due(self) -> list[Follow]:
        """Jobs to look at now."""
        now = time.monotonic()
        due = [each for each in list(self.follows) if each.look_at <= now and not each.full]
        return due[:_LOOKS]

    def _ask(self, pipe: Any, due: Iterable[Follow]) -> Any:
        for each in due:
            key = events_key(each.job_id)
            ask_result(pipe, each.job_id)
            pipe.xrange(key, min=f"({each.after[0]}-{each.after[1]}", count=PAGE)
            pipe.xrevrange(key, count=1)
        return pipe

    def _looked(self, due: Sequence[Follow], replies: Sequence[Any]) -> None:
        for number, each in enumerate(due):
            found = replies[4 * number : 4 * number + 4]
            try:
                if broken(*found):
                    raise next(reply for reply in found if isinstance(reply, ResponseError))
                over = each.looked(*found)
            except (OmlxQueueError, ResponseError) as error:
                each.inbox.put_nowait(error)
                over = True
            if over:
                self.follows.discard(each)

    def _listen(self) -> tuple[dict[Any, Any], int]:
        """The streams to read, each with an id, and for how many milliseconds."""
        self.listening, self._by_key = True, {}
        now = time.monotonic()
        until = now + self._block
        for each in list(self.follows):
            each.full = each.inbox.qsize() >= PAGE
            if not each.full:
                until = min(until, each.look_at)
                if each.listens:
                    self._by_key.setdefault(events_key(each.job_id).encode(), []).append(each)
        streams: dict[Any, Any] = {self._own: self._woken}
        for key, follows in self._by_key.items():
            tokens, part = min(each.after for each in follows)
            streams[key] = f"{tokens}-{part}"
        return streams, max(1, int(1000 * (until - now)))

    def _heard(self, reply: Any) -> None:
        self.listening = False
        for key, entries in reply.items() if isinstance(reply, dict) else reply:
            if key == self._own:
                self._woken = entries[-1][0]
            for each in self._by_key.get(key, ()):
                if each.read(entries):
                    self.follows.discard(each)

    def _failed(self, error: Exception) -> float:
        """Look at all jobs again. Returns the seconds to wait first."""
        self.listening = False
        pause = _PAUSE_SECONDS
        for each in list(self.follows):
            each.look_at = 0.0
            # An error of a key's type does not name the key. A look does.
            if str(error).startswith("WRONGTYPE"):
                continue
            try:
                pause = max(pause, each.outage.failed(error))
            except Exception as final:  # noqa: BLE001 (the consumer raises it)
                each.inbox.put_nowait(final)
                self.follows.discard(each)
        return pause

    def _ring(self, pipe: Any) -> Any:
        pipe.xadd(self._own, {"wake": ""}, maxlen=1, approximate=False)
        pipe.expire(self._own, _WAKE_SECONDS)
        return pipe


# A consumer that is collected leaves its reader, on any thread and at any line.
_LOCK = threading.RLock()
_READERS: dict[int, Reader] = {}
_ASYNC_READERS: dict[tuple[int, int], AsyncReader] = {}


class Reader(_Reading):
    """Follows jobs for all consumers of a client, from a thread that ends with the last of them."""

    def __init__(self, connection: redis.Redis) -> None:
        super().__init__(block_seconds(connection))
        pool = connection.connection_pool
        # redis-py would repeat a lost read by itself, and no job would be looked at.
        options = pool.connection_kwargs | {"retry": Retry(NoBackoff(), 0)}
        self._pool = redis.ConnectionPool(connection_class=pool.connection_class, **options)
        self._connection = redis.Redis(connection_pool=self._pool)
        self._waking = threading.Lock()
        self._key = id(connection)
        # The client lives as long, so its id is not another's.
        self._client = connection

    @classmethod
    def join(cls, connection: redis.Redis, follow: Follow) -> Reader:
        with _LOCK:
            reader = _READERS.get(id(connection))
            if reader is None:
                reader = _READERS[id(connection)] = cls(connection)
            reader.consumers += 1
            reader.follows.add(follow)
            if reader.consumers == 1:
                thread = threading.Thread(target=reader._run, name="omlx-streams", daemon=True)
                thread.start()
        return reader

    def leave(self, follow: Follow) -> None:
        with _LOCK:
            self.follows.discard(follow)
            self.consumers -= 1
            if self.consumers == 0:
                del _READERS[self._key]
                self._pool.disconnect()

    def wake(self) -> None:
        """Have the reader go on with the jobs that it follows now."""
        with _LOCK:
            listened, self.listening = self.listening, False
        if listened:
            with self._waking, contextlib.suppress(RedisError):
                self._ring(self._connection.pipeline()).execute()

    def _run(self) -> None:
        while self.consumers:
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 (each consumer raises it, or waits)
                with _LOCK:
                    pause = self._failed(error)
                time.sleep(pause)
        self._pool.disconnect()

    def _read(self) -> None:
        with _LOCK:
            due = self._due()
            streams, block = ({}, 0) if due else self._listen()
        if due:
            replies = self._ask(self._connection.pipeline(), due).execute(raise_on_error=False)
            with _LOCK:
                self._looked(due, replies)
        else:
            reply = self._connection.xread(streams, count=PAGE, block=block)
            with _LOCK:
                self._heard(reply)


class AsyncReader(_Reading):
    """The form of `Reader` for one event loop: a task that ends with the last consumer."""

    def __init__(self, connection: redis.asyncio.Redis) -> None:
        super().__init__(block_seconds(connection))
        pool = connection.connection_pool
        options = pool.connection_kwargs | {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
        self._pool = redis.asyncio.ConnectionPool(pool.connection_class, **options)
        self._connection = redis.asyncio.Redis(connection_pool=self._pool)
        self._waking = asyncio.Lock()
        self._client = connection
        self._task = asyncio.create_task(self._run())

    @classmethod
    def join(cls, connection: redis.asyncio.Redis, follow: Follow) -> AsyncReader:
        key = id(connection), id(asyncio.get_running_loop())
        reader = _ASYNC_READERS.get(key)
        if reader is None:
            reader = _ASYNC_READERS[key] = cls(connection)
            reader._task.add_done_callback(lambda _: _ASYNC_READERS.pop(key, None))
        reader.consumers += 1
        reader.follows.add(follow)
        return reader

    async def leave(self, follow: Follow) -> None:
        self.follows.discard(follow)
        self.consumers -= 1
        if self.consumers == 0:
            while not self._task.done():
                # redis-py may swallow a cancellation while it connects.
                self._task.cancel()
                await self._pool.disconnect()
                await asyncio.wait({self._task}, timeout=_PAUSE_SECONDS)
            await self._pool.disconnect()

    async def wake(self) -> None:
        """See `Reader.wake`."""
        listened, self.listening = self.listening, False
        if listened:
            async with self._waking:
                with contextlib.suppress(RedisError):
                    await self._ring(self._connection.pipeline()).execute()

    async def _run(self) -> None:
        while self.consumers:
            try:
                await self._read()
            except Exception as error:  # noqa: BLE001 (each consumer raises it, or waits)
                await asyncio.sleep(self._failed(error))

    async def _read(self) -> None:
        if due := self._due():
            pipe = self._ask(self._connection.pipeline(), due)
            self._looked(due, await pipe.execute(raise_on_error=False))
        else:
            streams, block = self._listen()
            self._heard(await self._connection.xread(streams, count=PAGE, block=block))
