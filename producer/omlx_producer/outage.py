"""Redis away, or unable to write: which errors pass, and how long to wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Self, TypeGuard

from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from omlx_producer.complaints import said, waiting_text

_PASSING = (
    ConnectionError,
    TimeoutError,
    OutOfMemoryError,
    ReadOnlyError,
    # Scripts were flushed between loading one and calling it; the next call loads it again.
    NoScriptError,
)
# For errors that redis-py has no class for, and for servers that wrap a script's error. A server
# that becomes a replica ends blocking commands with UNBLOCKED.
_PASSING_CODES = ("MISCONF ", "BUSY ", "NOREPLICAS ", "OOM ", "READONLY ", "UNBLOCKED ")
# Redis's limits of a call's length cannot be lower than this.
_LONG_BYTES = 2**20
# redis-py computes base * 2**failures, which overflows a float after a long outage.
_MAX_DOUBLINGS = 32
REMINDER_SECONDS = 30.0
"""How long a log says nothing of an outage that goes on."""

RECONNECT_SECONDS = 60.0
"""How long a consumer that waits for tokens or a result puts up with a Redis that is away."""


def passes(error: BaseException) -> TypeGuard[RedisError]:
    """Whether the call that raised this error may succeed later."""
    if isinstance(error, _PASSING):
        return True
    if not isinstance(error, ResponseError):
        return False
    message = said(error)
    return any(code in message for code in _PASSING_CODES)


class LongCall(ConnectionError):
    """A call failed that is so long that its length may be the cause.

    Redis closes the connection of a call that is too long for it, as in an outage.
    """

    @classmethod
    def of(cls, error: Exception, size: int) -> Self | None:
        """The error of a call of ``size`` bytes; None if its length cannot be the cause."""
        if size > _LONG_BYTES and (passes(error) or "Protocol error" in said(error)):
            return cls(f"{size} bytes in one call: {error}")
        return None


class Outage:
    """The failures in a row of one thread's calls. Any thread may read it.

    Args:
        first: seconds, the longest that the first pause takes. Pauses then double.
        longest: seconds, the longest pause.
        clock: monotonic seconds.
        log: told when an outage begins, every `REMINDER_SECONDS` while it lasts, and when it ends.

    Attributes:
        failures: failed calls so far, in all outages.
    """

    def __init__(
        self,
        first: float = 0.05,
        longest: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        log: logging.Logger | None = None,
    ) -> None:
        self.failures = 0
        self._backoff = EqualJitterBackoff(cap=longest, base=first)
        self._clock = clock
        self._log = log
        self._in_a_row = 0
        self._since: float | None = None
        self._told = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the first failure in the row; 0 if the last call succeeded."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def failed(self, error: Exception) -> float:
        """Note a failed call.

        Returns:
            Seconds to wait before the next call. They differ between processes.

        Raises:
            Exception: the error, if it does not pass.
        """
        if not passes(error):
            raise error
        return self.note(error)

    def note(self, error: Exception) -> float:
        """As `failed`, for a call that is repeated whatever its error is."""
        now = self._clock()
        begins = self._since is None
        if begins:
            self._since = now
        if self._log and (begins or now - self._told >= REMINDER_SECONDS):
            self._told = now
            self._log.warning(waiting_text(error))
        pause: float = self._backoff.compute(min(self._in_a_row, _MAX_DOUBLINGS))
        self._in_a_row += 1
        self.failures += 1
        return pause

    def answered(self) -> None:
        """Note a call that succeeded."""
        if self._log and self._since is not None:
            self._log.info("Redis is back after %.0f s", self.seconds)
        self._since, self._in_a_row = None, 0


class Reconnection(Outage):
    """The outage of a waiting consumer. Before a first answer, an error is raised at once.

    Args:
        patience: seconds without Redis, after an answer, until its error is raised.
    """

    def __init__(
        self, patience: float = RECONNECT_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(first=0.05, longest=1.0, clock=clock)
        self._patience = patience
        self._reached = False

    def failed(self, error: Exception) -> float:
        """See `Outage.failed`. A refused password is raised at once."""
        if not self._reached or self.seconds > self._patience:
            raise error
        if isinstance(error, AuthenticationError):
            raise error
        return super().failed(error)

    def answered(self) -> None:
        self._reached = True
        super().answered()
