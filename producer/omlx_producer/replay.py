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
from redis.exceptions import AuthenticationError

from omlx_producer.errors import InvalidRequest, OmlxQueueError, TokensLost
from omlx_producer.events import TokenEvent, TokensEvent, parse_event
from omlx_producer.outage import Outage
from omlx_producer.outcome import ENDINGS, ResultEntry, read_outcome, unknown_job

PAGE = 500
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
# RQ's statuses of jobs that wait.
_WAITING = (
    b"created",
    b"queued",
    b"deferred",
    b"ready_to_enqueue",
    b"rate_limited",
    b"scheduled",
)


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
        if cursor < 0:
            raise InvalidRequest(f"cursor: got {cursor}; give the n of an event, or 0 to start")
        self.job_id = job_id
        self.step = Step.SUBSCRIBE
        self._position = (cursor, 0)
        self._heard_of = cursor
        self._reconnect_for = reconnect_for
        self._reached = False
        self._outage = Outage(FIRST_PAUSE, LONGEST_PAUSE, clock)

    @property
    def cursor(self) -> int:
        return self._position[0]

    @property
    def after(self) -> str:
        """Where to read the stream from: the first id of an XRANGE."""
        return f"({self._position[0]}-{self._position[1]}"

    def subscribed(self) -> None:
        """A subscription was requested. It counts from its confirmation."""
        self.step = Step.LISTEN

    def heard(self, message: dict[str, Any] | None) -> list[TokenEvent]:
        """A message came on the channel; None after a silence."""
        if message is None or message["type"] == "subscribe":
            self.step = Step.READ
            return []
        if message["type"] != "message":
            return []
        event = self._parse(message["data"])
        if self._is_old(event):
            return []
        if self._leaves_gap(event):
            if isinstance(event, TokensEvent):
                self._heard_of = max(self._heard_of, event.n)
            self.step = Step.READ
            return []
        return [self._take(event)]

    def read(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]], status: bytes | None
    ) -> list[TokenEvent]:
        """Up to PAGE entries of the stream were read, from `after`, and the job's status.

        Raises:
            TokensLost: if the stream has lost tokens that the consumer has not had.
            UnknownJob: if there is neither a job nor the end of its stream.
        """
        self._reached = True
        self._outage.answered()
        found = [self._parse(fields.get(b"event", b"")) for _, fields in entries]
        if status in _WAITING and any(not isinstance(event, TokensEvent) for event in found):
            # The job was requeued. The worker that claims it deletes the stream of the earlier run.
            self.step = Step.LISTEN
            return []
        events: list[TokenEvent] = []
        for event in found:
            if self.step is Step.END or self._is_old(event):
                continue
            if isinstance(event, TokensEvent) and self._leaves_gap(event):
                raise self._lost(event.since)
            events.append(self._take(event))
        if self.step is Step.END or len(found) == PAGE:
            return events
        if self.cursor < self._heard_of:
            raise self._lost(self._heard_of)
        if status is None:
            raise unknown_job(self.job_id)
        self.step = Step.CONCLUDE if status.decode() in ENDINGS else Step.LISTEN
        return events

    def conclude(self, status: bytes | None, entry: ResultEntry | None) -> list[TokenEvent]:
        """The stream of an ended job has no terminal event: status and last result were read.

        Raises:
            UnknownJob: if the job or its result has expired.
        """
        ending = ENDINGS.get(status.decode()) if status else None
        if ending is None:
            self.step = Step.READ
            return []
        return [self._take(read_outcome(self.job_id, ending, entry).as_event(self.cursor))]

    def failed(self, error: Exception) -> float:
        """The connection failed; subscribe again.

        Args:
            error: a ConnectionError or TimeoutError of redis-py. It is raised after
                ``reconnect_for`` seconds, and at once if the server refuses the password or has
                never answered.

        Returns:
            Seconds to wait first.
        """
        too_long = self._outage.seconds > self._reconnect_for
        if too_long or not self._reached or isinstance(error, AuthenticationError):
            raise error
        self.step = Step.SUBSCRIBE
        return self._outage.failed(error)

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

    def _leaves_gap(self, event: TokenEvent) -> bool:
        since = event.since if isinstance(event, TokensEvent) else event.n
        return since > self.cursor

    def _take(self, event: TokenEvent) -> TokenEvent:
        self._position = _position(event)
        if not isinstance(event, TokensEvent):
            self.step = Step.END
        return event

    def _lost(self, cursor: int) -> TokensLost:
        return TokensLost(
            f"tokens {self.cursor + 1} to {cursor} of job {self.job_id} have left its stream; "
            "wait for its result, which has the whole text",
            cursor,
        )


def _position(event: TokenEvent) -> tuple[int, int]:
    """The id of an event's stream entry as numbers."""
    return event.n, 0 if isinstance(event, TokensEvent) else 1
