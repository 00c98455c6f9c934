"""Iterators over the tokens of a job: each token once, in order, from any cursor.

A consumer may attach before, during or after the job, be slow, or lose its connection. A stream
reads on a connection of its own.

Each event says where its tokens and its text begin in their choice, and has a digest of the
choice's tokens. So what comes twice is cut off, and what was written anew is never mixed with what
was had: a killed server may lose the end of a stream, which workers then write again, maybe in
other events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Self

import redis
from pydantic import ValidationError
from redis.exceptions import RedisError

from omlx_producer.client.outcome import (
    WAITING,
    ask_result,
    event_of,
    read_end,
    require_job_id,
    unknown_job,
)
from omlx_producer.connection import block_seconds, connect, require_client
from omlx_producer.errors import InvalidRequest, OmlxQueueError, TokensLost
from omlx_producer.outage import RECONNECT_SECONDS as RECONNECT_SECONDS
from omlx_producer.outage import Reconnection
from omlx_producer.wire import Completion, End, EndEvent, Markup, events_key
from omlx_producer.wire.end import ENDED
from omlx_producer.wire.events import JobEvent, ReadChoice, TokensEvent, parse_event
from omlx_producer.wire.markup import StreamedReply

PAGE = 500
_MOST_TOKENS = 2**63 - 1
"""A stream's ids, which count tokens, are numbers of 64 bits."""

REQUEUED_SECONDS = 0.25
"""Between looks at a job that waits again. It has the stream of its earlier run until its claim."""


class TokenStream:
    """An iterator over the events of a job. It ends after the terminal event.

    Args:
        connection: a Redis client, or a URL. A stream takes a connection of the client's pool while
            it waits for the next event, so threads that read at once need as many.
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
        require_client(self._connection)
        self.cursor = cursor
        self._events = _follow(self._connection, Follower(job_id, cursor, reconnect_for))

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


Entry = tuple[bytes, dict[bytes, bytes]]


def entries_by_key(reply: Any) -> Sequence[tuple[bytes, list[Entry]]]:
    """The reply to XREAD, whose form depends on the version of the protocol."""
    if isinstance(reply, dict):
        return [(key, entries) for key, (entries,) in reply.items()]
    return reply or ()


def _follow(connection: redis.Redis, follower: Follower) -> Generator[JobEvent]:
    block = int(1000 * block_seconds(connection))
    while not follower.over:
        try:
            if follower.looks:
                found = follower.looked(*follower.ask(connection.pipeline()).execute())
            else:
                reply = connection.xread({follower.key: follower.after}, PAGE, block)
                found = follower.heard([each for _, page in entries_by_key(reply) for each in page])
        except RedisError as error:
            time.sleep(follower.failed(error))
            continue
        yield from found
        if follower.early:
            time.sleep(REQUEUED_SECONDS)


class Follower:
    """What a consumer asks Redis next, and what the answers add to what it has had.

    Attributes:
        key: of the job's stream.
        after: the id of the last entry read.
        over: whether it has had the terminal event.
        looks: whether it looks at the job next, not only at its stream: at first, after a lost
            connection, and after a silence, since other tools end jobs without an event.
        early: whether the stream is that of an earlier run, until a worker claims the job.
    """

    def __init__(self, job_id: str, cursor: int, patience: float) -> None:
        self._delivered = Delivered(job_id, cursor)
        self._outage = Reconnection(patience)
        self.job_id = job_id
        self.key = events_key(job_id)
        self.after = f"{cursor}-0"
        self.over, self.looks, self.early = False, True, False

    def ask(self, pipe: Any) -> Any:
        """Queue the commands of a look."""
        ask_result(pipe, self.job_id)
        pipe.xrange(self.key, min=f"({self.after}", count=PAGE)
        pipe.xrevrange(self.key, count=1)
        return pipe

    def looked(
        self,
        status: bytes | None,
        results: Sequence[Entry],
        entries: Sequence[Entry],
        last: Sequence[Entry],
    ) -> Iterator[JobEvent]:
        """The events that a look adds.

        Raises:
            UnknownJob: if there is neither a job nor the end of its stream, or no result.
            MalformedResult: see `read_end`.
        """
        self._outage.answered()
        ended = bool(last) and not last[0][0].endswith(b"-0")
        name = status.decode() if status else ""
        self.early = ended and status in WAITING
        if self.early:
            return
        # Again, if a page was full, or the job has ended and its entries may not be the last ones.
        self.looks = len(entries) == PAGE or bool(entries and (name in ENDED or status is None))
        if entries:
            yield from self._take(self._read(entries))
        elif ended:
            # The stream is shorter than what was had.
            yield from self._take([last[0][1].get(b"event", b"")])
        elif status is None:
            raise unknown_job(self.job_id)
        elif name in ENDED:
            yield from self._take([read_end(self.job_id, name, results[0] if results else None)])

    def heard(self, entries: Sequence[Entry]) -> Iterator[JobEvent]:
        """The events that new entries of the stream add; none is a silence."""
        self.looks = not entries
        return self._take(self._read(entries))

    def failed(self, error: RedisError) -> float:
        """Note a lost connection. Returns the seconds to wait; see `Reconnection.failed`."""
        self.looks = True
        return self._outage.failed(error)

    def _read(self, entries: Sequence[Entry]) -> Iterator[bytes]:
        for entry_id, fields in entries:
            self.after = entry_id.decode()
            yield fields.get(b"event", b"")

    def _take(self, items: Iterable[bytes | End]) -> Iterator[JobEvent]:
        try:
            for item in items:
                event = self._delivered.take(item)
                self.over = self._delivered.over
                if event is not None:
                    yield event
        except _Gap:
            self.after, self.looks = f"{self._delivered.base}-0", True


class FirstText:
    """The text of one job's first choice, in pieces, without thinking and calls of tools."""

    def __init__(self) -> None:
        self._reply: StreamedReply | None = None
        self._told = 0

    def take(self, event: JobEvent) -> str:
        """What one event adds."""
        if not isinstance(event, TokensEvent):
            return ""
        self._reply = self._reply or StreamedReply(event.markup or Markup())
        text = ""
        for delta in event.choices:
            if delta.index == 0:
                added = self._reply.feed(delta.text, delta.marks or ())
                text += "".join(each for span, each in added if span.part == "content")
        self._told += len(text)
        return text

    def rest(self, whole: Completion) -> str:
        """What no event has added: short jobs of the queue ``bulk`` publish no tokens."""
        return whole.text[self._told :]


# What a consumer has had


class _Gap(Exception):
    """The stream has lost something in the middle: read it again from the first cursor."""


class Delivered:
    """What a consumer has had of a job since its first cursor.

    Attributes:
        base: the first cursor.
        over: whether it has had the terminal event.
    """

    def __init__(self, job_id: str, cursor: int) -> None:
        if type(cursor) is not int or not 0 <= cursor <= _MOST_TOKENS:
            raise InvalidRequest(
                "cursor", f"got {cursor!r}", "give the n of an event, or 0 to start"
            )
        require_job_id(job_id)
        self.job_id = job_id
        self.base = cursor
        self.over = False
        self._cursor = cursor
        self._choices: dict[int, ReadChoice] = {}
        self._read_again = False

    def take(self, item: bytes | End) -> JobEvent | None:
        """What an entry of the stream, or the end of a job, adds to what was had.

        Raises:
            _Gap: if something before it is missing. It is a TokensLost the second time.
            TokensLost: if the stream holds others than were had, or no event ends at the cursor.
        """
        if is_end := isinstance(item, End):
            event: JobEvent = event_of(self.job_id, item, self._cursor)
        else:
            event = self._parse(item)
        if isinstance(event, TokensEvent):
            return self._add(event)
        if event.end.ok:
            self._require_whole(event, is_end)
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
                self._choices[delta.index] = ReadChoice(*before)
            had = self._choices[delta.index]
            if delta.start > had.tokens or delta.offset > had.text:
                self._miss(event.since)
        rest = []
        for delta in event.choices:
            try:
                added = self._choices[delta.index].go_on(delta)
            except ValueError:
                raise self._rewritten() from None
            if added.text or added.tokens:
                rest.append(added)
        self._cursor = max(self._cursor, event.n)
        if not rest:
            return None
        self._read_again = False
        return event if rest == event.choices else event.model_copy(update={"choices": rest})

    def _require_whole(self, event: EndEvent, from_result: bool) -> None:
        """A finished job has published all of its tokens, or none."""
        # The last text of a choice may have counted as a token.
        if self.base > event.usage.completion_tokens + len(event.finish_reasons):
            raise self._no_end_of_an_event()
        # Without any token so far, it has published none.
        if not self._cursor:
            return
        if self._cursor < event.n:
            self._miss(event.n)
        for delta in event.choices:
            # After a cursor, a choice without a later event is not known.
            had = self._choices.get(delta.index, None if self.base else ReadChoice())
            if had is None:
                continue
            if had.tokens < delta.start or had.text < delta.offset:
                self._miss(event.n)
            if (had.tokens, had.text, had.digest) != (delta.start, delta.offset, delta.digest):
                raise self._rewritten()
        # A result has no digests, but the number of tokens.
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
