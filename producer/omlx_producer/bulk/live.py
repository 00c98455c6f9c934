"""What the workers of a run do now: nothing of it is known from rows before the first one ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import redis
from redis.exceptions import RedisError

from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.workers import read_workers

FIGURES_SECONDS = 2.0


class WorkerWatch:
    """Reads the figures of the workers of some models every `FIGURES_SECONDS`."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._looked_at = float("-inf")

    def look(self, models: Iterable[str], meter: Meter, in_flight: int) -> None:
        """Tell the meter what runs. Workers may hold jobs of other clients too.

        Args:
            in_flight: rows in Redis; no more of them can run.
        """
        if time.monotonic() - self._looked_at < FIGURES_SECONDS:
            return
        self._looked_at = time.monotonic()
        # The feed meets an outage.
        with contextlib.suppress(RedisError):
            workers = [w for model in models for w in read_workers(self._connection, model)]
            meter.now = Speed(
                running=min(in_flight, sum(worker.jobs for worker in workers)),
                tokens_in=sum(worker.prompt_tokens_per_second for worker in workers),
                tokens_out=sum(worker.tokens_per_second for worker in workers),
            )
