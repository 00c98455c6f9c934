"""How long Redis has been away, or unable to write, and how long to wait for it."""

from __future__ import annotations

from redis.exceptions import ConnectionError, RedisError

from omlx_producer.backoff import Backoff
from omlx_producer.trouble import passes

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


class RedisGone(ConnectionError):
    """Redis has been in trouble for longer than the worker was told to bear."""


class Outage:
    """How long one thread's calls have failed in a row. Any thread may read it."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    @property
    def seconds(self) -> float:
        """Since the first failure in the row; 0 when the last call was answered."""
        return self._backoff.seconds

    def failed(self, error: RedisError) -> float:
        """A call failed.

        Returns:
            Seconds to wait before the next.

        Raises:
            RedisError: the error, if trying again is of no use.
        """
        if not passes(error):
            raise error
        return self._backoff.next()

    def answered(self) -> None:
        self._backoff.reset()
