"""The MTP heads of Qwen3.5 and GLM-4.7-Flash, which mlx-lm drops when it loads or converts them.

The head predicts token ``t + 2`` from the backbone's hidden state at ``t``, taken AFTER its
final norm (the tensor that the output projection scores), and the embedding of token ``t + 1``.
With the state before the norm the head drafts too, but fewer drafts are accepted.
Source: the names and shapes of published checkpoints, and the two inputs' order in ``mtp.fc``.
GLM's is published as one layer more than the model has, ``model.layers.N``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.glm4_moe_lite import Model as Glm4MoeLite
from mlx_lm.models.qwen3_5 import Model as Qwen35
from mlx_lm.models.qwen3_5_moe import Model as Qwen35Moe
from mlx_lm.models.qwen3_next import Model as Qwen3Next

Weights = dict[str, mx.array]

_PREFIX = re.compile(r"(?:language_model\.|model\.)*mtp\.")
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")
_FUSED = re.compile(r"(.+\.mlp)\.experts\.(gate_up_proj|down_proj)")
_APPENDED = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""What the parts of an appended layer beside its own are here."""

_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_SILENT = ("mimo_v2_flash",)
"""Families whose configurations do not speak of their heads."""


class MTPHead(nn.Module):
    """One decoder layer, of full attention, over a mix of an embedding and a hidden state.

    Attributes:
        origin: the checkpoint that it was taken from, if not from the model's own.
    """

    origin: str | None = None

    def __init__(self, args: Any, layer: type[nn.Module]) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        after_all = args.num_hidden_layers + 1
        self.layers = [layer(args, getattr(args, "full_attention_interval", after_all) - 1)]
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """Predict two tokens ahead.

        Args:
            embeddings: ``[B, T, hidden]``, of the token after each position.
            hidden: ``[B, T, hidden]``, the backbone's output at each position.
            caches: one mlx-lm key-value cache a layer, None for a layer that sees these positions
                alone.

        Returns:
            ``[B, T, hidden]``, normed: what the output projection scores, and what takes the
            place of ``hidden`` one draft deeper.
        """
        inputs = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(inputs, axis=-1))
        for layer, cache in zip(self.layers, caches, strict=True):
            mask = create_attention_mask(x, cache, return_array=True)
            x = layer(x, mask=mask, cache=cache)
        normed: mx.array = self.norm(x)
        return normed


def text_model(model: Any) -> Any:
    """The language model inside a loaded model, which Qwen3-Next is itself."""
    return getattr(model, "language_model", model)


class _WithHead:
    """Mixed into mlx-lm's model classes: keeps the head's weights through `sanitize`.

    A head is kept if the checkpoint has all of its weights, whatever the config promises.

    Attributes:
        head_fault: why the checkpoint's head cannot be used, once it is loaded; None if it can
            be, or if there is none.
    """

    head_fault: str | None = None

    def __init__(self, args: Any) -> None:
        super().__init__(args)  # type: ignore[call-arg]
        self.mtp: MTPHead | None = new_head(self)

    def sanitize(self, weights: Weights) -> Weights:
        layers = text_model(self).args.num_hidden_layers
        backbone = {n: value for n, value in weights.items() if not is_of_head(n, layers)}
        # mlx-lm's own test, for Qwen3.5, of whether a checkpoint is in Hugging Face's form.
        raw = any("conv1d.weight" in k and v.shape[-1] != 1 for k, v in backbone.items())
        converted: Weights = super().sanitize(backbone)  # type: ignore[misc]
        head, self.head_fault = self.head_weights(weights, raw_backbone=raw)
        if not head:
            self.mtp = None
        return converted | head

    def head_weights(self, weights: Weights, *, raw_backbone: bool) -> tuple[Weights, str | None]:
        """A checkpoint's tensors of the head in the form that mlx-lm's are in, named ``mtp.*``.

        Args:
            weights: the tensors, perhaps among others.
            raw_backbone: whether the checkpoint's other tensors are in Hugging Face's form.

        Returns:
            The weights, and why they cannot be used; None if they can, or if there are none.
        """
        head = fold_experts(self._named(weights))
        if not head:
            return {}, None
        if faults := _faults(new_head(self), head):
            return {}, "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else "")
        return self._in_form(head, raw_backbone), None

    def _named(self, weights: Weights) -> Weights:
        """The head's tensors, named ``mtp.*``."""
        matches = ((_PREFIX.match(name), value) for name, value in weights.items())
        return {"mtp." + m.string[m.end() :]: value for m, value in matches if m}

    def _in_form(self, head: Weights, raw_backbone: bool) -> Weights:
        return _shift_norms(head, raw_backbone)


class Qwen35WithHead(_WithHead, Qwen35):
    """A dense Qwen3.5 that keeps its MTP head."""


class Qwen35MoeWithHead(_WithHead, Qwen35Moe):
    """A mixture-of-experts Qwen3.5 that keeps its MTP head."""

    def sanitize(self, weights: Weights) -> Weights:
        # mlx-lm splits fused experts here but, unlike for Qwen3-Next, does not stack separate
        # ones, which is how transformers saves this family since version 5.
        return super().sanitize(fold_experts(weights))


class Qwen3NextWithHead(_WithHead, Qwen3Next):
    """A Qwen3-Next that keeps its MTP head."""


class Glm4MoeLiteWithHead(_WithHead, Glm4MoeLite):
    """A GLM-4.7-Flash that keeps its MTP head."""

    def _named(self, weights: Weights) -> Weights:
        layers = self.args.num_hidden_layers
        prefix = f"model.layers.{layers}."
        copies = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")
        own = {
            n: v for n, v in weights.items() if n.startswith(prefix) and not n.startswith(copies)
        }
        # As one of the model's own, mlx-lm converts the layer as it does them.
        one_more: Any = SimpleNamespace(args=replace(self.args, num_hidden_layers=layers + 1))
        named = super()._named(weights)
        for name, value in Glm4MoeLite.sanitize(one_more, own).items():
            path, _, kind = name.removeprefix(prefix).rpartition(".")
            named[f"mtp.{_APPENDED.get(path, f'layers.0.{path}')}.{kind}"] = value
        return named

    def _in_form(self, head: Weights, raw_backbone: bool) -> Weights:  # noqa: ARG002
        return head


def with_head(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class that keeps the MTP head, or the class itself if its family has none."""
    classes = {
        Qwen35: Qwen35WithHead,
        Qwen35Moe: Qwen35MoeWithHead,
        Qwen3Next: Qwen3NextWithHead,
        Glm4MoeLite: Glm4MoeLiteWithHead,
    }
    return classes.get(model_class, model_class)


def new_head(model: Any) -> MTPHead:
    """A head for a model, its weights not set."""
    text = text_model(model)
    return MTPHead(text.args, type(text.layers[0]))


def can_have_head(model: nn.Module) -> bool:
    """Whether a loaded model is of a family with heads."""
    return isinstance(model, _WithHead)


def is_of_head(name: str, layers: int | None) -> bool:
    """Whether a tensor with this name belongs to the head of a model with this many layers."""
    return _PREFIX.match(name) is not None or name.startswith(f"model.layers.{layers}.")


def promises_head(config: Mapping[str, Any]) -> bool:
    """Whether a configuration speaks of a head, whatever its checkpoint's files have."""
    text_config = config.get("text_config", config)
    promised = any(text_config.get(promise) for promise in _PROMISES)
    return promised or text_config.get("model_type") in _SILENT


def fold_experts(weights: Weights) -> Weights:
    """Bring the experts of every layer into mlx-lm's form, ``mlp.switch_mlp``.

    They come as a matrix per expert and projection (``mlp.experts.7.up_proj.weight``), stacked
    here, or fused (``mlp.experts.gate_up_proj``, ``[E, 2 * intermediate, hidden]``), split here.
    """
    folded: Weights = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        if match := _EXPERT.fullmatch(name):
            mlp, expert, projection, part = match.groups()
            experts.setdefault(f"{mlp}.switch_mlp.{projection}.{part}", {})[int(expert)] = value
        elif match := _FUSED.fullmatch(name):
            mlp, projection = match.groups()
            into = ("down_proj",) if projection == "down_proj" else ("gate_proj", "up_proj")
            for part, matrix in zip(into, mx.split(value, len(into), axis=-2), strict=True):
                folded[f"{mlp}.switch_mlp.{part}.weight"] = matrix
        else:
            folded[name] = value
    stacked = {name: mx.stack([by[i] for i in sorted(by)]) for name, by in experts.items()}
    return folded | stacked


def _faults(head: MTPHead, weights: Weights) -> list[str]:
    """Why these weights, quantised or not, cannot be the head's; empty if they can."""
    wanted = {f"mtp.{name}": value.shape for name, value in tree_flatten(head.parameters())}
    for path in [name.removesuffix(".weight") for name in wanted]:
        if f"{path}.scales" in weights:
            # The packing along the last axis is mlx-lm's own, so it is not compared.
            rows = wanted[f"{path}.weight"][:-1]
            affine = weights[f"{path}.scales"].dtype != mx.uint8
            for part in ("weight", "scales", "biases")[: 3 if affine else 2]:
                wanted[f"{path}.{part}"] = rows
    faults = [f"{name} is missing" for name in wanted if name not in weights]
    for name, value in weights.items():
        shape = wanted.get(name)
        if shape is None:
            faults.append(f"{name} has no place in it")
        elif value.shape[: len(shape)] != shape:
            faults.append(f"{name} has shape {value.shape}")
    return faults


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
