"""The ragged form of a loaded model, which is compared with the model's own forward."""

from __future__ import annotations

import mlx.nn as nn

from omlx_worker.engine.kernels.contest import HERE
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.loading.self_check import check
from omlx_worker.engine.models.embedder import Embedder
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.towers.looks import Looks
from omlx_worker.engine.towers.tower import Tower


def as_ragged(
    network: nn.Module,
    *,
    drafts: bool = True,
    kernels: Kernels | None = None,
    checks: bool = True,
    embedder: Embedder | None = None,
    tower: Tower | None = None,
) -> RaggedModel:
    """The ragged form of a loaded model.

    Args:
        drafts: whether to use its MTP head, if it has one.
        kernels: the forms of its layers' parts; None for the device's, in this process's contest.
        checks: whether to compare it with the model's own forward, on these weights and this
            device.
        embedder: see `RaggedModel`. What is checked sees back alone.
        tower: of a model that takes pictures.

    Raises:
        Unsupported: if it has none, or the two disagree.
    """
    ragged = RaggedModel(network, kernels or for_device(HERE), drafts=drafts)
    if checks:
        check(network, ragged)
    ragged.embedder = embedder
    ragged.looks = Looks(tower) if tower else None
    return ragged
