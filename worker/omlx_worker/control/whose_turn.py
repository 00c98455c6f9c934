"""Which of a worker's models is due, by what waits in Redis and what other workers have loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis import Redis
from redis.utils import str_if_bytes
from rq.suspension import is_suspended

from omlx_producer.client.workers import WorkerFigures
from omlx_producer.figures import ModelFigures, read_figures
from omlx_producer.wire import read_queue_name
from omlx_producer.wire.keys import load_key
from omlx_worker.control.served import ServedModel
from omlx_worker.control.turns import Turns

# In this time a model usually gives way, and the figures say which one is loaded next.
CLAIM_SECONDS = 10


class WhoseTurn:
    """Runs on the main thread.

    Args:
        name: of the worker.
        models: of the worker, by alias.
        switch_after: see `Turns`.
    """

    def __init__(
        self,
        connection: Redis,
        name: str,
        models: Mapping[str, ServedModel],
        switch_after: float,
    ) -> None:
        self._connection = connection
        self._name = name
        self._models = models
        self._turns = Turns(switch_after)

    def loaded(self, seconds: float) -> None:
        """See `Turns.loaded`."""
        self._turns.loaded(seconds)

    def next(self, loaded: ServedModel | None, *, busy: bool) -> ServedModel | None:
        """The model that is to be loaded now in place of the loaded one; None for none.

        Args:
            busy: whether the loaded one has jobs.
        """
        if is_suspended(self._connection):
            return None
        found = {each.alias: each for each in read_figures(self._connection)}
        models = {
            alias: found[alias]
            for alias, model in self._models.items()
            if alias in found and not (found[alias].paused or model.rests)
        }
        waiting = [
            place
            for alias, model in models.items()
            if any(queue.waiting for queue in model.queues.values())
            for queue in self._models[alias].leases.waiting()
            if (place := read_queue_name(queue))
        ]
        others = [each for each in waiting if loaded is None or each[0] != loaded.alias]
        elsewhere = {
            alias
            for alias, model in models.items()
            if any(each.takes_jobs for each in self._others(model))
        }
        busy = busy or len(others) < len(waiting)
        while (
            (target := self._turns.next(others, elsewhere, busy=busy))
            and target not in elsewhere
            and not self._is_first(models[target])
        ):
            elsewhere.add(target)
        return self._models[target] if target else None

    def _others(self, model: ModelFigures) -> list[WorkerFigures]:
        """The other workers of a model that know all fields of the requests that wait."""
        version = max(queue.wire_version for queue in model.queues.values())
        return [w for w in model.workers if w.name != self._name and w.wire_version >= version]

    def _is_first(self, model: ModelFigures) -> bool:
        """Whether this worker is the first to announce that it loads a model, but for those that
        could not; its figures say so later."""
        key = load_key(model.alias)
        first: Any = self._connection.set(key, self._name, nx=True, ex=CLAIM_SECONDS, get=True)
        unable = {each.name for each in model.workers if each.fault}
        return first is None or str_if_bytes(first) in {self._name, *unable}
