"""The loop around a run: on through outages of Redis, until done or interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.exceptions import RedisError

from omlx_producer.bulk.collector import Collector
from omlx_producer.outage import Outage, waiting_text
from omlx_producer.signals import StopSignals
from omlx_producer.terminal import write

WAIT_SECONDS = 0.5
PATIENCE_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0


def drive(
    collector: Collector,
    signals: StopSignals,
    on_turn: Callable[[], None],
    *,
    patience: float = PATIENCE_SECONDS,
) -> bool:
    """Turn a collector until nothing is left to do.

    Args:
        on_turn: called after each turn.
        patience: seconds for which Redis may be away.

    Returns:
        True at the end of the rows, False after an interrupt.

    Raises:
        redis.exceptions.RedisError: if Redis is away for longer, or refuses.
        KeyboardInterrupt: at the second interrupt, or the first if Redis is away.
    """
    stopping, outage = False, Outage(FIRST_PAUSE, LONGEST_PAUSE)
    while collector.busy:
        if signals.asked and not stopping:
            stopping = True
            collector.stop()
            write(
                f"\nstopping; waiting for the rows that run, of {collector.in_flight} in Redis. "
                "Interrupt again to leave at once\n",
                err=True,
            )
        try:
            collector.turn(WAIT_SECONDS)
            outage.answered()
        except RedisError as error:
            if stopping:
                # Nothing can be waited for.
                raise KeyboardInterrupt from error
            _wait(outage, error, patience)
            collector.recover()
        on_turn()
    return not stopping


def _wait(outage: Outage, error: RedisError, patience: float) -> None:
    """Sleep before the next try.

    Raises:
        redis.exceptions.RedisError: the error, if it does not pass, or patience has run out.
    """
    away = outage.seconds
    if away > patience:
        raise error
    pause = outage.failed(error)
    if not away:
        write(waiting_text(error) + "\n", err=True)
    time.sleep(pause)
