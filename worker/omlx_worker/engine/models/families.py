"""Model families that run on the ragged batch, by the class that mlx-lm loads them into."""

from __future__ import annotations

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe
from mlx_lm.models.qwen3_next import Model as Qwen3Next

from omlx_worker.engine.kernels.device import Kernels
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.models.ragged_model import RaggedModel


def as_ragged(
    network: nn.Module, *, drafts: bool = True, kernels: Kernels | None = None
) -> RaggedModel | None:
    """The ragged form of a loaded model, or None if its family has none.

    Args:
        drafts: whether to use its MTP head, if it has one.
        kernels: the implementations of its layers; by default the device's.
    """
    if isinstance(network, Qwen35 | Qwen35Moe | Qwen3Next):
        return RaggedQwen35(network, drafts=drafts, kernels=kernels)
    return None
