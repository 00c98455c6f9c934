"""The ragged form of a loaded model: its family's own, or that of any family."""

from __future__ import annotations

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe
from mlx_lm.models.qwen3_next import Model as Qwen3Next

from omlx_worker.engine.kernels.device import Kernels, attention_for_device
from omlx_worker.engine.loading.self_check import check
from omlx_worker.engine.models.any_family import AnyFamily
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.models.ragged_model import RaggedModel


def as_ragged(
    network: nn.Module,
    *,
    drafts: bool = True,
    kernels: Kernels | None = None,
    checks: bool = True,
) -> RaggedModel:
    """The ragged form of a loaded model.

    Args:
        drafts: whether to use its MTP head, if it has one.
        kernels: the implementations of its layers; by default the device's.
        checks: whether to compare it with the model's own forward, on these weights and this
            device.

    Raises:
        Unsupported: if it has none, or the two disagree.
    """
    ragged: RaggedModel
    if isinstance(network, Qwen35 | Qwen35Moe | Qwen3Next):
        ragged = RaggedQwen35(network, drafts=drafts, kernels=kernels)
    else:
        ragged = AnyFamily(network, kernels.attention if kernels else attention_for_device())
    if checks:
        check(network, ragged)
    return ragged
