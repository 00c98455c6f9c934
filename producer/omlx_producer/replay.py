"""Delivers every token once and in order, from a durable stream and a lossy channel.

Nothing here does input or output. `Replay` names the next step, takes its outcome, and returns the
events for the consumer. `omlx_producer.stream` carries the steps out, sync and async.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

from pydantic import ValidationError

from omlx_producer.delivered import Delivered
from omlx_producer.errors import InvalidRequest, OmlxQueueError, TokensLost
from omlx_producer.events import (
    DoneEvent,
    TerminalEvent,
    TokenEvent,
    TokensEvent,
    parse_event,
)
from omlx_producer.outage import Reconnection
from omlx_producer.outcome import ENDINGS, ResultEntry, read_outcome, require_job_id, unknown_job

PAGE = 500
_MOST_TOKENS = 2**63 - 1
"""A stream's ids, which count tokens, are numbers of 64 bits."""
WAITING = (
    b"created",
    b"queued",
    b"deferred",
    b"ready_to_enqueue",
    b"rate_limited",
    b"scheduled",
)
"""RQ's statuses of jobs that wait."""


class Step(Enum):
    """What to do next."""

    SUBSCRIBE = auto()
    LISTEN = auto()
    READ = auto()
    CONCLUDE = auto()
    END = auto()


class Replay:
    """Follow one job: subscribe, read the stream, listen to the channel, read again when in doubt.

    It reads the stream

    * at every confirmation of a subscription: redis-py reconnects silently, and messages published
      meanwhile are lost;
    * when a message shows that an earlier one is missing;
    * after a silence: servers drop slow readers, and other tools end jobs without an event.

    Each reading begins with the last event taken. If the stream no longer holds it, the server has
    lost writes: the stream is read again from the first cursor, and what the consumer has had is
    taken off.

    Attributes:
        step: what to do next; answer with the method named after it, or with `failed`.
        cursor: the number of tokens that the consumer has had.
    """

    def __init__(
        self,
        job_id: str,
        cursor: int,
        *,
        reconnect_for: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(cursor) is not int or not 0 <= cursor <= _MOST_TOKENS:
            raise InvalidRequest(f"cursor: got {cursor!r}; give the n of an event, or 0 to start")
        require_job_id(job_id)
        self.job_id = job_id
        self.step = Step.SUBSCRIBE
        self.cursor = cursor
        self._base = cursor
        self._position = (cursor, 0)
        self._last: TokenEvent | None = None
        self._delivered = Delivered()
        self._heard_of = cursor
        self._outage = Reconnection(reconnect_for, clock)

    @property
    def start(self) -> str:
        """Where to read the stream from: the first id of an XRANGE."""
        return f"({self._base}-0" if self._last is None else self._last.stream_id

    def subscribed(self) -> None:
        """A subscription was requested. It counts from its confirmation."""
        self.step = Step.LISTEN

    def heard(self, message: dict[str, Any] | None) -> list[TokenEvent]:
        """A message came on the channel; None after a silence."""
        if message is None or message["type"] == "subscribe":
            if message is not None:
                # A server that was killed may lack what it has published.
                self._heard_of = 0
            self.step = Step.READ
            return []
        if message["type"] != "message":
            return []
        event = self._parse(message["data"])
        if self._is_old(event):
            return []
        if not self._follows(event):
            if isinstance(event, TokensEvent):
                self._heard_of = max(self._heard_of, event.n)
            self.step = Step.READ
            return []
        return self._take(event)

    def read(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]], status: bytes | None
    ) -> list[TokenEvent]:
        """Up to PAGE entries of the stream were read, from `start`, and the job's status.

        Raises:
            TokensLost: if the stream has lost tokens that the consumer has not had, or holds others
                than the consumer has had, or no event ends at the first cursor.
            UnknownJob: if there is neither a job nor the end of its stream.
        """
        self._outage.answered()
        found = [self._parse(fields.get(b"event", b"")) for _, fields in entries]
        if status in WAITING and any(not isinstance(event, TokensEvent) for event in found):
            # The job was requeued. The worker that claims it deletes the stream of the earlier run.
            self.step = Step.LISTEN
            return []
        if self._last is not None and self._last not in found[:1]:
            self._read_again()
            return []
        events: list[TokenEvent] = []
        for event in found:
            if self.step is Step.END or self._is_old(event):
                continue
            if isinstance(event, TokensEvent) and not self._follows(event):
                if event.since < self._base:
                    raise self._no_end_of_an_event()
                raise self._lost(self._position[0], event.since)
            events += self._take(event)
        if self.step is Step.END or len(found) == PAGE:
            return events
        if self._position[0] < self._heard_of:
            raise self._lost(self._position[0], self._heard_of)
        if status is None:
            raise unknown_job(self.job_id)
        self.step = Step.CONCLUDE if status.decode() in ENDINGS else Step.LISTEN
        return events

    def conclude(self, status: bytes | None, entry: ResultEntry | None) -> list[TokenEvent]:
        """The stream of an ended job has no terminal event: status and last result were read.

        Raises:
            UnknownJob: if the job or its result has expired.
            TokensLost: if the job has fewer tokens than the first cursor says.
        """
        ending = ENDINGS.get(status.decode()) if status else None
        if ending is None:
            self.step = Step.READ
            return []
        event = read_outcome(self.job_id, ending, entry).as_event(self.cursor)
        # The last text of a choice may have counted as a token.
        if isinstance(event, DoneEvent) and self._base > event.usage.completion_tokens + len(
            event.finish_reasons
        ):
            raise self._no_end_of_an_event()
        return [self._end(event)]

    def failed(self, error: Exception) -> float:
        """The connection failed; subscribe again.

        Args:
            error: a ConnectionError or TimeoutError of redis-py. It is raised after
                ``reconnect_for`` seconds, and at once if the server refuses the password or has
                never answered.

        Returns:
            Seconds to wait first.
        """
        pause = self._outage.failed(error)
        self.step = Step.SUBSCRIBE
        return pause

    def _parse(self, payload: bytes) -> TokenEvent:
        try:
            return parse_event(payload)
        except ValidationError:
            raise OmlxQueueError(
                f"the stream of job {self.job_id} holds an event that cannot be read; "
                "wait for its result, which has the whole text"
            ) from None

    def _is_old(self, event: TokenEvent) -> bool:
        return _position(event) <= self._position

    def _follows(self, event: TokenEvent) -> bool:
        """Whether an event begins where the last one taken ends."""
        if isinstance(event, TokensEvent):
            return event.since == self._position[0]
        return event.n <= self._position[0]

    def _take(self, event: TokenEvent) -> list[TokenEvent]:
        """What an event of the stream adds to what the consumer has had."""
        self._position, self._last = _position(event), event
        if not isinstance(event, TokensEvent):
            if isinstance(event, DoneEvent) and self._delivered.is_behind:
                raise self._rewritten()
            return [self._end(event)]
        try:
            fresh = self._delivered.take(event)
        except ValueError:
            raise self._rewritten() from None
        if not self._delivered.is_behind:
            self.cursor = event.n
        return [] if fresh is None else [fresh]

    def _end(self, event: TerminalEvent) -> TerminalEvent:
        """End with a terminal event. A finished job has published all of its tokens, or none."""
        if isinstance(event, DoneEvent) and 0 < self.cursor < event.n:
            raise self._lost(self.cursor, event.n)
        self.step = Step.END
        return event

    def _read_again(self) -> None:
        self._position, self._last, self._heard_of = (self._base, 0), None, 0
        self._delivered.read_again()
        self.step = Step.READ

    def _lost(self, since: int, until: int) -> TokensLost:
        return TokensLost(
            f"tokens {since + 1} to {until} of job {self.job_id} have left its stream; wait for "
            "its result, which has the whole text",
            until,
        )

    def _no_end_of_an_event(self) -> TokensLost:
        return TokensLost(
            f"no event of job {self.job_id} ends with token {self._base}: it is no event's n, or "
            "Redis has lost tokens that were read; start again from cursor 0",
            0,
        )

    def _rewritten(self) -> TokensLost:
        return TokensLost(
            f"Redis has lost tokens of job {self.job_id} that were read, and the job has written "
            "them again otherwise; start again from cursor 0",
            0,
        )


def _position(event: TokenEvent) -> tuple[int, int]:
    """The id of an event's stream entry as numbers."""
    return event.n, 0 if isinstance(event, TokensEvent) else 1
