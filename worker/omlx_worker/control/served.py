"""The models that a worker serves in turn. One is loaded; the jobs of the others wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from redis import Redis

from omlx_producer.client.workers import NOT_LOADED
from omlx_producer.figures import ModelFigures, read_figures
from omlx_worker.control.boards import ModelBoards
from omlx_worker.control.loaded import LoadedModel
from omlx_worker.control.turns import Turns
from omlx_worker.decode.counters import Counters
from omlx_worker.messages import MainMailbox, Ring, StopJob
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.worker")

# Between the looks of a busy worker at the queues of the others.
LOOK_SECONDS = 2.0
# For the step that runs when a model gives way to another.
CLOSE_SECONDS = 60.0


class ServedModels:
    """Runs on the main thread.

    Args:
        models: their settings.
        make: makes a model that is to be loaded.
        name: of the worker.
        main: see `messages`.

    Attributes:
        loaded: the model that is loaded, is being loaded, or will be first.
        served: whether any job was taken.
    """

    def __init__(
        self,
        models: Sequence[WorkerSettings],
        make: Callable[[WorkerSettings, LeaseTable, Counters], LoadedModel],
        boards: ModelBoards,
        *,
        connection: Redis,
        name: str,
        main: MainMailbox,
    ) -> None:
        self.served = False
        self._main = main
        self._connection = connection
        self._name = name
        self._models = {each.alias: each for each in models}
        self._leases = {
            alias: LeaseTable(
                connection,
                name,
                model.queues,
                seconds=model.lease_seconds,
                on_free=lambda: main.put(Ring()),
                on_stop=lambda claim: main.put(StopJob(claim.id)),
            )
            for alias, model in self._models.items()
        }
        self._upkeep = [Upkeep(leases) for leases in self._leases.values()]
        self._make = make
        self._boards = boards
        self._turns = Turns(models[0].switch_after)
        # The model to load once the loaded one has no job left, and when that one stopped.
        self._target: str | None = None
        self._left_at: float | None = None
        self._look_at = 0.0
        # Whether any model was loaded yet.
        self._begun = False
        self.loaded = self._new(models[0].alias)

    @property
    def is_switching(self) -> bool:
        """Whether a model is being loaded, or will be once the loaded one has given way."""
        return self._target is not None or self.loaded.is_loading

    def attend(self) -> None:
        """See `Upkeep.attend`; that of all models, whose jobs other workers may have left."""
        for upkeep in self._upkeep:
            upkeep.attend()

    def postpone(self) -> None:
        """See `Upkeep.postpone`."""
        for upkeep in self._upkeep:
            upkeep.postpone()

    def leave(self) -> None:
        """See `Upkeep.leave`."""
        for upkeep in self._upkeep:
            upkeep.leave()

    def take(self) -> bool:
        """Take jobs of the loaded model, or go on with loading another.

        Returns:
            Whether there is anything to do.

        Raises:
            Exception: what the engine of an only model raised when it was made.
        """
        loaded, taken = self.loaded, False
        if len(self._models) == 1 and loaded.loading is None:
            loaded.load()
        if loaded.is_loading:
            if self._has_arrived():
                # The next turn knows how many rows may run.
                self._main.put(Ring())
            return True
        if self._target is not None:
            self._give_way(self._target)
            return True
        if loaded.fault:
            [model] = read_figures(self._connection, loaded.alias)
            taken = not self._is_loaded_elsewhere(model) and loaded.refuse()
            if not (taken or len(loaded.leases)):
                # The next job has it loaded again.
                loaded.close()
                self.loaded = self._new(loaded.alias)
        elif loaded.admission is not None:
            taken = loaded.admission.take(loaded.max_rows, loaded.bulk_rows)
            self.served |= taken
        if len(self._models) == 1:
            return taken
        busy = taken or len(loaded.leases) > 0
        if busy and time.monotonic() < self._look_at:
            return taken
        self._look_at = time.monotonic() + LOOK_SECONDS
        if target := self._next(busy=busy):
            self._target = target
            if loaded.admission is not None:
                log.info("%s gives way to %s", loaded.alias, target)
                self._left_at = time.monotonic()
                loaded.give_back()
            self._give_way(target)
        return taken or target is not None

    # Turns

    def _next(self, *, busy: bool) -> str | None:
        """The model that is to be loaded now; None for none.

        Args:
            busy: whether the loaded one has jobs.
        """
        found = {each.alias: each for each in read_figures(self._connection)}
        models = {alias: found[alias] for alias in self._models if alias in found}
        paused = {alias for alias, model in models.items() if model.paused}
        loaded = self.loaded
        current = loaded.alias if loaded.admission else None
        if loaded.is_paused and loaded.alias not in paused:
            return None  # RQ has suspended all workers.
        waiting = [
            (alias, level)
            for alias, model in models.items()
            for level, queue in model.queues.items()
            if queue.waiting and alias not in paused
        ]
        others = [each for each in waiting if each[0] != current]
        elsewhere = {alias for alias, model in models.items() if self._is_loaded_elsewhere(model)}
        busy = busy or any(alias == current for alias, _ in waiting)
        while (
            (target := self._turns.next(others, elsewhere, busy=busy))
            and target not in elsewhere
            and not self._boards.claims(target)
        ):
            elsewhere.add(target)
        return loaded.alias if target is None and not self._begun else target

    def _is_loaded_elsewhere(self, model: ModelFigures) -> bool:
        others = (each for each in model.workers if each.name != self._name)
        return any(each.state != NOT_LOADED for each in others)

    def _give_way(self, target: str) -> None:
        """Load a model once the loaded one has no jobs."""
        if len(self.loaded.leases):
            return
        if self.loaded.loading is None and self.loaded.alias == target:
            self._target, self._begun = None, True
            self.loaded.load()
            return
        if not self.loaded.close(CLOSE_SECONDS):
            raise RuntimeError(f"the engine of {self.loaded.alias} does not end")
        self._boards.loads()
        self.loaded = self._new(target)
        # Loading begins with the next turn, when nothing holds the old model any more.
        self._main.put(Ring())

    def _new(self, alias: str) -> LoadedModel:
        return self._make(self._models[alias], self._leases[alias], self._boards.counters[alias])

    def _has_arrived(self) -> bool:
        """Whether a model is loaded, or cannot be: then its jobs fail."""
        loaded = self.loaded
        assert loaded.loading is not None
        if not loaded.loading.done():
            return False
        try:
            self._serve()
        except Exception as error:
            if len(self._models) == 1:
                raise
            loaded.fail(error)
            self._left_at = None
            log.error("the jobs of %s fail: %s", loaded.alias, loaded.fault)
        return True

    def _serve(self) -> None:
        self._turns.loaded(time.monotonic() - self.loaded.since)
        self.loaded.serve()
        self._boards.serves(self.loaded)
        if self._left_at is not None:
            counters = self._boards.counters[self.loaded.alias]
            counters.switches += 1
            counters.switch_seconds += time.monotonic() - self._left_at
            self._left_at = None
