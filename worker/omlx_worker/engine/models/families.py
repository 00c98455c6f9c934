"""The ragged form of a loaded model: its family's own, or that of any family."""

from __future__ import annotations

import logging

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe
from mlx_lm.models.qwen3_next import Model as Qwen3Next

from omlx_worker.engine.kernels.device import Kernels
from omlx_worker.engine.models.any_family import AnyFamily, Unsupported
from omlx_worker.engine.models.experts import choose_forms
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.models.self_check import check

log = logging.getLogger(__name__)


def as_ragged(
    network: nn.Module, *, drafts: bool = True, kernels: Kernels | None = None
) -> RaggedModel | None:
    """The ragged form of a loaded model; None, with a warning that says why, if it has none.

    Args:
        drafts: whether to use its MTP head, if it has one.
        kernels: the implementations of its layers; by default the device's.
    """
    ragged = _form_of(network, drafts, kernels)
    if ragged is not None:
        choose_forms(network, ragged.dtype)
    return ragged


def _form_of(network: nn.Module, drafts: bool, kernels: Kernels | None) -> RaggedModel | None:
    if isinstance(network, Qwen35 | Qwen35Moe | Qwen3Next):
        return RaggedQwen35(network, drafts=drafts, kernels=kernels)
    try:
        ragged = AnyFamily(network)
        check(network, ragged)
    except Unsupported as reason:
        family = type(network).__module__.rpartition(".")[2]
        log.warning("%s models run on mlx-lm's BatchGenerator, because %s", family, reason)
        return None
    return ragged
