"""The MTP head of the Qwen3.5 family, which mlx-lm drops when it loads a checkpoint.

The head predicts token ``t + 2`` from the backbone's hidden state at ``t``, taken AFTER its
final norm (the tensor that the output projection scores), and the embedding of token ``t + 1``.
Source: the names and shapes of published checkpoints, and the two inputs' order in ``mtp.fc``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe

log = logging.getLogger(__name__)

Weights = dict[str, mx.array]


class MTPHead(nn.Module):
    """One full-attention decoder layer over a mix of an embedding and a hidden state."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [DecoderLayer(args, layer_idx=args.full_attention_interval - 1)]
        self.norm = nn.RMSNorm(size, eps=eps)

    def mix(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """What the decoder layer takes, from both inputs of `__call__`."""
        normed = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        mixed: mx.array = self.fc(mx.concatenate(normed, axis=-1))
        return mixed

    def __call__(
        self, embeddings: mx.array, hidden: mx.array, caches: Sequence[Any] | None = None
    ) -> mx.array:
        """Predict two tokens ahead.

        Args:
            embeddings: ``[B, T, hidden]``, of the token after each position.
            hidden: ``[B, T, hidden]``, the backbone's normed output at each position.
            caches: one mlx-lm key-value cache a layer, or None to see these positions alone.

        Returns:
            ``[B, T, hidden]``, normed: what the output projection scores, and what takes the
            place of ``hidden`` one draft deeper.
        """
        x = self.mix(embeddings, hidden)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, mask=create_attention_mask(x, cache), cache=cache)
        normed: mx.array = self.norm(x)
        return normed


class _WithHead:
    """Mixed into mlx-lm's model classes: keeps the head's weights through `sanitize`."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)  # type: ignore[call-arg]
        text_args = self.language_model.args  # type: ignore[attr-defined]
        self.mtp: MTPHead | None = MTPHead(text_args) if _promised(args.text_config) else None

    def sanitize(self, weights: Weights) -> Weights:
        head = {
            "mtp." + name.split("mtp.", 1)[1]: value
            for name, value in weights.items()
            if name.startswith(("mtp.", "model.mtp.", "language_model.mtp."))
        }
        raw_backbone = any("conv1d.weight" in k and v.shape[-1] != 1 for k, v in weights.items())
        backbone: Weights = super().sanitize(weights)  # type: ignore[misc]
        if self.mtp is not None and not head:
            log.warning("the checkpoint promises an MTP head but has no mtp.* weights: no drafts")
            self.mtp = None
        if self.mtp is None:
            return backbone
        return backbone | _shift_norms(head, raw_backbone)


def _promised(text_config: dict[str, Any]) -> bool:
    return bool(text_config.get("mtp_num_hidden_layers", 0))


def _shift_norms(head: Weights, raw_backbone: bool) -> Weights:
    """Turn norms stored minus one into mlx-lm's form.

    A head beside a raw backbone is raw. Beside a converted backbone it may be either, since
    converters dropped it and others put it back: raw norms average near 0, converted near 1.
    """
    norms = [name for name, value in head.items() if "norm" in name and value.ndim == 1]
    averages = mx.stack([head[name].astype(mx.float32).mean() for name in norms])
    if not raw_backbone and mx.mean(averages) > 0.5:
        return head
    return head | {name: head[name] + 1.0 for name in norms}


class Qwen35WithHead(_WithHead, Qwen35):
    """A dense Qwen3.5 that keeps its MTP head."""


class Qwen35MoeWithHead(_WithHead, Qwen35Moe):
    """A mixture-of-experts Qwen3.5 that keeps its MTP head."""


def with_head(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class that keeps the MTP head, or the class itself where its family has none."""
    return {Qwen35: Qwen35WithHead, Qwen35Moe: Qwen35MoeWithHead}.get(model_class, model_class)
