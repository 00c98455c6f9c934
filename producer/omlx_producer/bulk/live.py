"""What the workers of a run do now: nothing of it is known from rows before the first one ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import redis
from redis.exceptions import RedisError

from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.client.waiting import read_started
from omlx_producer.client.workers import read_workers
from omlx_producer.terminal import write

FIGURES_SECONDS = 2.0


class WorkerWatch:
    """Reads what the workers of some models do for a run or a batch every `FIGURES_SECONDS`.

    It says on stderr, once, that nobody serves a model whose rows wait.

    Args:
        jobs: what the ids of its jobs begin with.
    """

    def __init__(self, connection: redis.Redis, jobs: str) -> None:
        self._connection = connection
        self._own = jobs.encode()
        self._looked_at = float("-inf")
        self._unserved: set[str] = set()
        self._told: set[str] = set()

    def look(self, models: Iterable[str], meter: Meter, in_flight: int) -> None:
        """Tell the meter what runs.

        Rows of a batch advance together, so the run's tokens a second are its share of the rows.

        Args:
            in_flight: rows in Redis.
        """
        if time.monotonic() - self._looked_at < FIGURES_SECONDS:
            return
        self._looked_at = time.monotonic()
        # The collector meets an outage.
        with contextlib.suppress(RedisError):
            running, tokens_in, tokens_out, unserved = 0, 0.0, 0.0, set()
            for model in models:
                workers = read_workers(self._connection, model)
                if not workers and in_flight:
                    unserved.add(model)
                started = read_started(self._connection, model)
                own = sum(job.startswith(self._own) for job in started)
                share = own / max(1, len(started))
                running += own
                tokens_in += share * sum(worker.prompt_tokens_per_second for worker in workers)
                tokens_out += share * sum(worker.tokens_per_second for worker in workers)
            meter.now = Speed(running, tokens_in, tokens_out)
            self._tell(unserved)

    def _tell(self, unserved: set[str]) -> None:
        """Name the models that two looks in a row have found without a worker."""
        self._told &= unserved
        for model in sorted((unserved & self._unserved) - self._told):
            write(f"no worker serves {model}; its rows wait for one\n", err=True)
            self._told.add(model)
        self._unserved = unserved
