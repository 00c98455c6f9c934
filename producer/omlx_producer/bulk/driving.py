"""Driving a runner to its end: through outages of Redis, and until the user interrupts."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import click
from redis.exceptions import RedisError

from omlx_producer.backoff import Backoff
from omlx_producer.bulk.feeding import Feeder
from omlx_producer.bulk.runner import Runner
from omlx_producer.trouble import passes

PATIENCE_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
WAIT_SECONDS = 0.5


class Interrupts:
    """SIGINT and SIGTERM: the first asks to stop, the second stops at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals for the length of the block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def drive(
    runner: Runner,
    interrupts: Interrupts,
    on_turn: Callable[[], None],
    *,
    patience: float = PATIENCE_SECONDS,
) -> bool:
    """Turn until nothing is left to do.

    Args:
        on_turn: called after each turn.
        patience: seconds for which Redis may be away.

    Returns:
        whether it went to its end; False when it was interrupted.

    Raises:
        redis.exceptions.RedisError: if Redis was away for longer, or refuses.
        KeyboardInterrupt: at the second interrupt.
    """
    stopping, waiting = False, Waiting(patience)
    while runner.busy:
        if interrupts.asked and not stopping:
            stopping = True
            runner.stop_feeding()
            click.echo(
                f"\nstopping; of {runner.in_flight} rows those that run are waited for. "
                "Interrupt again to leave at once",
                err=True,
            )
        try:
            runner.turn(WAIT_SECONDS)
            waiting.over()
        except RedisError as error:
            waiting.wait(error)
            runner.recover()
        on_turn()
    return not stopping


def serve(feeder: Feeder, interrupts: Interrupts, *, burst: bool) -> None:
    """Feed batches until interrupted; in a burst, until none is left.

    Raises:
        redis.exceptions.RedisError: if Redis is away at the start, or refuses.
    """
    waiting, first = Waiting(float("inf")), True
    while not interrupts.asked and (first or not (burst and feeder.idle)):
        try:
            feeder.turn()
            first = False
            waiting.over()
        except RedisError as error:
            if first:
                raise
            waiting.wait(error)
            feeder.recover()


class Waiting:
    """Waits, longer and longer, for a server to be of use again.

    Args:
        patience: seconds for which it may be of none.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    def over(self) -> None:
        """It answered."""
        self._backoff.reset()

    def wait(self, error: RedisError) -> None:
        """It did not do as asked.

        Raises:
            redis.exceptions.RedisError: the error, if waiting is of no use, or has been for too
                long.
        """
        away = self._backoff.seconds
        if away > self._patience or not passes(error):
            raise error
        if not away:
            click.echo(f"Redis is in trouble ({error}); waiting for it", err=True)
        time.sleep(self._backoff.next())
