"""Qwen3-Next as ragged windows: a Qwen3.5 whose recurrent projections are interleaved by head."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.metal.net_inputs import Projected
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35


def projected_interleaved(module: Any, x: mx.array) -> Projected:
    """The projections of mlx-lm's `Qwen3NextGatedDeltaNet`: two products, grouped by key head."""
    q, k, v, gate, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(x), module.in_proj_ba(x)
    )
    return mx.concatenate([part.flatten(2) for part in (q, k, v)], axis=-1), gate, a, b


class RaggedQwen3Next(RaggedQwen35):
    """A `RaggedModel` around a loaded ``qwen3_next`` model."""

    _project = staticmethod(projected_interleaved)
