"""What the workers of a run do now: nothing of it is known from rows before the first one ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import redis
from redis.exceptions import RedisError

from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.terminal import write
from omlx_producer.workers import read_workers

FIGURES_SECONDS = 2.0


class WorkerWatch:
    """Reads the figures of the workers of some models every `FIGURES_SECONDS`.

    It says on stderr, once, that nobody serves a model whose rows wait.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._looked_at = float("-inf")
        self._unserved: set[str] = set()
        self._told: set[str] = set()

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
            by_model = {model: read_workers(self._connection, model) for model in models}
            workers = [worker for found in by_model.values() for worker in found]
            meter.now = Speed(
                running=min(in_flight, sum(worker.jobs for worker in workers)),
                tokens_in=sum(worker.prompt_tokens_per_second for worker in workers),
                tokens_out=sum(worker.tokens_per_second for worker in workers),
            )
            self._tell({name for name, found in by_model.items() if in_flight and not found})

    def _tell(self, unserved: set[str]) -> None:
        """Name the models that two looks in a row have found without a worker."""
        self._told &= unserved
        for model in sorted((unserved & self._unserved) - self._told):
            write(f"no worker serves {model}; its rows wait for one\n", err=True)
            self._told.add(model)
        self._unserved = unserved
