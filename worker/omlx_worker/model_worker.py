"""Makes the worker of one model, or of several, from settings."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from omlx_worker import build
from omlx_worker.control.in_turn import ModelsInTurn, Start
from omlx_worker.control.status import Turn
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.mac.buffers import held_back
from omlx_worker.mac.machine import ON_MAC, Mac
from omlx_worker.settings import WorkerSettings


def make_worker(settings: WorkerSettings, turn: Turn | None, connection: Redis) -> GenerationWorker:
    """A worker for the model with these settings. It loads it when it starts.

    Args:
        turn: see `GenerationWorker`.
    """
    return GenerationWorker(
        settings,
        build.load_or_end,
        # The parent of a child has told what it is.
        describe=build.describe if turn is None else None,
        connection=connection,
        machine=Mac(allow_sleep=settings.allow_sleep or not ON_MAC),
        outside=held_back,
        turn=turn,
    )


def make_in_turn(models: Sequence[WorkerSettings], start: Start, connection: Redis) -> ModelsInTurn:
    """A worker that serves models in turn. See `ModelsInTurn`."""
    return ModelsInTurn(models, start, connection=connection, describe=build.describe)
