"""Which idle workers of a model look for jobs, so that a thousand of them do not all do.

A producer rings after it has enqueued jobs, and about `FEW` workers look for each of them. For
jobs that nobody rings for, such as those of other tools, one idle worker looks at every poll and
the others every `LOOK_SECONDS`. A worker that holds jobs looks as it has room and asks nobody.
"""

from __future__ import annotations

import time
from contextlib import suppress
from random import random

from redis import Redis

from omlx_producer.client.workers import workers_key

# More than ten workers hear one ring in 400.
FEW = 4
LOOK_SECONDS = 10.0
# For how long one worker looks for all. Others ask to be the next as often, or less often if all of
# them together would ask more than `MOST_ASKS` times a second.
TERM_SECONDS = 2.0
MOST_ASKS = 50


class Lookout:
    """Of one worker. `hears` may be called on any thread, `is_due` on the main one.

    Args:
        model: the alias.
    """

    def __init__(self, connection: Redis, model: str, worker: str) -> None:
        self._connection = connection
        self._model = model
        self._worker = worker
        self._others = 1
        self._until = self._ask_at = self._look_at = 0.0

    def hears(self, payload: bytes) -> bool:
        """Whether this worker is one of those that look after a ring.

        Args:
            payload: the number of new jobs; anything else stands for one.
        """
        jobs = 1
        with suppress(ValueError):
            jobs = int(payload)
        return random() * self._others < FEW * max(1, jobs)

    def is_due(self) -> bool:
        """Whether to look now, of a worker that holds nothing and has heard no ring."""
        now = time.monotonic()
        if now >= self._look_at:
            # Workers that started together do not look together.
            self._look_at = now + LOOK_SECONDS * (0.5 + random())
            self._others = max(1, self._connection.hlen(workers_key(self._model)))
            return True
        if now >= self._until and now >= self._ask_at:
            self._ask(now)
        return now < self._until

    def _ask(self, now: float) -> None:
        """Try to be the one that looks for all."""
        key, milliseconds = f"omlx:lookout:{self._model}", int(1000 * TERM_SECONDS)
        if self._connection.set(key, self._worker, nx=True, px=milliseconds):
            # The next term is taken at once, before others ask.
            self._until = self._ask_at = now + TERM_SECONDS
        else:
            self._ask_at = now + max(TERM_SECONDS, 2 * random() * self._others / MOST_ASKS)
