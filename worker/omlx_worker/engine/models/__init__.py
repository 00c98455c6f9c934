"""Model families that run on the ragged batch, by the class that mlx-lm loads them into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe
from mlx_lm.models.qwen3_next import Model as Qwen3Next

from omlx_worker.engine.attention_cache import Window
from omlx_worker.engine.layer_cache import LayerCache
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.models.qwen3_next import RaggedQwen3Next


class RaggedModel(Protocol):
    """What the batch asks of a model: prefill one row, decode windows of many."""

    dtype: mx.Dtype
    vocabulary: int
    hidden: int
    weight_bytes: int

    @property
    def drafts(self) -> bool:
        """Whether the model has a head to draft with."""
        ...

    def new_prompt_cache(self) -> list[Any]: ...

    @property
    def head_layers(self) -> int:
        """How many of the caches, the last of them, are the head's."""
        ...

    def prefill(self, tokens: mx.array, following: mx.array, caches: Sequence[Any]) -> None: ...

    def read(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array: ...

    def read_by_head(
        self, following: mx.array, hidden: mx.array, caches: Sequence[Any]
    ) -> None: ...

    def prompt_arrays(self, caches: Sequence[Any]) -> list[list[mx.array]]: ...

    def new_caches(self, slots: int, capacity: int) -> list[LayerCache]: ...

    def wrap(self, arrays: Sequence[Sequence[mx.array]]) -> list[LayerCache]: ...

    def forward(
        self, tokens: mx.array, caches: Sequence[LayerCache], window: Window, accepted: mx.array
    ) -> mx.array: ...

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array: ...


_FAMILIES: dict[type[nn.Module], Callable[..., RaggedModel]] = {
    Qwen35: RaggedQwen35,
    Qwen35Moe: RaggedQwen35,
    Qwen3Next: RaggedQwen3Next,
}


def as_ragged(network: nn.Module, *, drafts: bool = True) -> RaggedModel | None:
    """The ragged form of a loaded model, or None where its family has none.

    Args:
        drafts: whether its MTP head, if it has one, is to be used.
    """
    for family, ragged in _FAMILIES.items():
        if isinstance(network, family):
            return ragged(network, drafts=drafts)
    return None
