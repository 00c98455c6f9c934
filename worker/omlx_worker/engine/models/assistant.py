"""Gemma 4's assistant: a few layers that draft, and read the target's own keys and values.

It keeps nothing of a row. At a position it takes the embedding of the token after it and the
target's normed output there, and attends to what the target's last layer of each kind has kept up
to that position. Deeper drafts stay at that position, with the assistant's output in place of the
target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs
from mlx_lm.models.gemma4_text import Model as Gemma4

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.window import Window
from omlx_worker.engine.models.layer_view import LayerView, serve_views
from omlx_worker.engine.models.mtp import text_model
from omlx_worker.engine.models.ragged_model import LayerCache, LayerShape
from omlx_worker.engine.models.served_layers import copied

FAMILIES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass
class AssistantArgs(BaseModelArgs):
    """The configuration of an assistant's checkpoint."""

    backbone_hidden_size: int
    text_config: dict[str, Any]
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32


class Assistant(nn.Module):
    """The network, whose tensors have Hugging Face's names."""

    def __init__(self, config: AssistantArgs) -> None:
        super().__init__()
        layers = config.text_config["num_hidden_layers"]
        text = config.text_config | {"num_kv_shared_layers": layers}
        text |= {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
        self.args = args = ModelArgs.from_dict(text)
        size, self.backbone_size = args.hidden_size, config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * self.backbone_size, size, bias=False)
        self.post_projection = nn.Linear(size, self.backbone_size, bias=False)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(args.vocab_size, size)
        self.model.layers = [DecoderLayer(args, n) for n in range(layers)]
        self.model.norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        self.best_clusters = 0
        if config.use_ordered_embeddings:
            self.best_clusters = config.centroid_intermediate_top_k
            self.masked_embedding = nn.Module()
            self.masked_embedding.centroids = nn.Linear(size, config.num_centroids, bias=False)
            self.masked_embedding.token_ordering = mx.zeros((args.vocab_size,), mx.int32)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Leave out the copy of the embeddings that some files have as ``lm_head``."""
        return {name: value for name, value in weights.items() if name != "lm_head.weight"}

    def scores(self, hidden: mx.array) -> mx.array:
        """``[..., hidden]`` to ``[..., vocabulary]``; -inf outside of the best clusters."""
        embeddings = self.model.embed_tokens
        if not self.best_clusters:
            scores: mx.array = embeddings.as_linear(hidden)
            return scores
        masked, best = self.masked_embedding, self.best_clusters
        order = masked.token_ordering.reshape(masked.centroids.weight.shape[0], -1)
        clusters = mx.argpartition(masked.centroids(hidden), -best, axis=-1)[..., -best:]
        tokens = order[clusters].flatten(-2)
        scores = (embeddings(tokens) @ hidden[..., None])[..., 0]
        others = mx.full((*hidden.shape[:-1], self.args.vocab_size), -mx.inf, scores.dtype)
        return mx.put_along_axis(others, tokens, scores, axis=-1)

    def misfit(self, network: nn.Module) -> str | None:
        """Why it cannot draft for a loaded model; None if it can. Completes "because ..."."""
        if not has_assistants(network):
            return "it is an assistant of Gemma 4, and the model is of another family"
        text = text_model(network)
        own, theirs = self.args, text.args
        pairs = {
            "backbone_hidden_size": (self.backbone_size, theirs.hidden_size),
            "layer_types": (set(own.layer_types), set(own.layer_types) & set(_kinds(text))),
        }
        for name in ("vocab_size", "sliding_window", "head_dim", "global_head_dim"):
            pairs[name] = getattr(own, name), getattr(theirs, name)
        apart = (f"its {n} is {a}, and the model has {b}" for n, (a, b) in pairs.items() if a != b)
        return next(apart, None)


class AssistantDrafter:
    """The `Drafter` of a Gemma 4.

    Args:
        network: that it drafts for.
        assistant: without a `Assistant.misfit` to it.
        kernels: the forms of its layers' parts.
    """

    advances = False
    layers: Sequence[LayerShape] = ()
    slow_parts: Sequence[str] = ()

    def __init__(self, network: nn.Module, assistant: Assistant, kernels: Kernels) -> None:
        self._text = text_model(network)
        self._assistant: Assistant = copied(assistant)
        serve_views(self._assistant, kernels)
        # The caches that layers of each kind read.
        self._read = {kind: number for number, kind in enumerate(_kinds(self._text))}
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, assistant.parameters(), 0)
        self.logits = self._assistant.scores

    def read(self, *_: Any) -> None:
        """It keeps nothing of a prompt."""

    def draft(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[LayerCache], window: Window
    ) -> mx.array:
        net, inner, width = self._assistant, self._text.model, hidden.shape[1]
        if tokens.shape[1] == width:  # one draft deeper
            hidden = net.post_projection(hidden)
        embedded = inner.embed_tokens(tokens[:, -width:]) * inner.embed_scale
        x = net.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in net.model.layers:
            cache = caches[self._read[layer.layer_type]]
            assert isinstance(cache, AttentionCache)
            view = LayerView(cache, window)
            x, _, _ = layer(x, view.make_mask(width), shared_kv=(view, view), offset=view.offset)
        out: mx.array = net.model.norm(x)
        return out


def has_assistants(network: nn.Module) -> bool:
    """Whether a loaded model is of the family that assistants are made for."""
    return isinstance(text_model(network), Gemma4)


def _kinds(text: Gemma4) -> list[str]:
    """The kinds of the layers that keep keys and values."""
    kept = text.args.num_hidden_layers - text.args.num_kv_shared_layers
    return list(text.args.layer_types[:kept])
