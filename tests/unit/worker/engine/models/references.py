"""Tiny checkpoints saved by transformers, each with the PyTorch model that it came from.

What a loaded model computes is compared with transformers' own forward, and its MTP head, which
transformers leaves out, with the few lines of `ReferenceHead`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoTokenizer,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_layers import MtpLayer

from tests.helpers.checkpoints import MIXTURE, QWEN_TEXT, write_tokenizer
from tests.helpers.families import COMMON, LATENT

_NOT_IN_TRANSFORMERS = ("model_type", "full_attention_interval", "mtp_num_hidden_layers")
_ROPE = {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5}
_TEXT = {k: v for k, v in QWEN_TEXT.items() if k not in _NOT_IN_TRANSFORMERS}
_TEXT |= {"rope_parameters": _ROPE, "tie_word_embeddings": False}
_GLM = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "vocab_size", "n_routed_experts"),
    *("n_shared_experts", "num_experts_per_tok", "rms_norm_eps", "max_position_embeddings"),
)
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def _dense() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_TEXT))


def _dense_tied_with_vision() -> PreTrainedModel:
    text = _TEXT | {"tie_word_embeddings": True}
    config = Qwen3_5Config(text_config=text, vision_config=_VISION, tie_word_embeddings=True)
    return Qwen3_5ForConditionalGeneration(config)


def _mixture() -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_TEXT, **MIXTURE))


def _mixture_with_vision() -> PreTrainedModel:
    config = Qwen3_5MoeConfig(text_config=_TEXT | MIXTURE, vision_config=_VISION)
    return Qwen3_5MoeForConditionalGeneration(config)


def _next() -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_TEXT, **MIXTURE))


def _glm() -> PreTrainedModel:
    sizes = {name: COMMON[name] for name in _GLM}
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**sizes, **LATENT, rope_parameters=rope))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": _dense,
    "dense, tied, with a vision tower": _dense_tied_with_vision,
    "mixture": _mixture,
    "mixture with a vision tower": _mixture_with_vision,
    "next": _next,
    "glm": _glm,
}


class ReferenceHead(torch.nn.Module):
    """concat(norm(embedding), norm(hidden)) -> fc -> one of transformers' layers -> norm."""

    def __init__(self, text: torch.nn.Module) -> None:
        super().__init__()
        size, eps = text.config.hidden_size, text.config.rms_norm_eps
        norm, layer = type(text.norm), type(text.layers[-1])
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([layer(text.config, len(text.layers) - 1)])
        self.norm = norm(size, eps=eps)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rotary: torch.nn.Module
    ) -> torch.Tensor:
        """``[B, T, hidden]``, normed."""
        normed = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(normed, dim=-1))
        length = x.shape[1]
        x = self.layers[0](
            x,
            position_embeddings=rotary(x, torch.arange(length)[None]),
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
        )
        normed_out: torch.Tensor = self.norm(x)
        return normed_out


class AppendedHead(torch.nn.Module):
    """transformers' own layer of such a head, which it builds for other families than GLM-4.7."""

    def __init__(self, text: torch.nn.Module) -> None:
        super().__init__()
        last = len(text.layers) - 1
        self.layer = MtpLayer(text.config, type(text.layers[-1]), type(text.norm), last)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rotary: torch.nn.Module
    ) -> torch.Tensor:
        """``[B, T, hidden]``, normed."""
        length = embeddings.shape[1]
        places = torch.arange(length)[None]
        normed_out: torch.Tensor = self.layer(
            inputs_embeds=embeddings,
            previous_hidden_state=hidden,
            position_embeddings=rotary(embeddings, places),
            attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            position_ids=places,
            cache=None,
        )
        return normed_out

    def published(self, layers: int) -> dict[str, torch.Tensor]:
        """Its tensors, named as in a model with this many layers."""
        names = {
            "layer.mtp_block": f"model.layers.{layers}",
            "layer.post_norm": f"model.layers.{layers}.shared_head.norm",
            "layer": f"model.layers.{layers}",
        }
        named = {}
        for name, value in self.state_dict().items():
            start = next(start for start in names if name.startswith(f"{start}."))
            named[names[start] + name.removeprefix(start)] = value
        return named


@dataclass(frozen=True)
class Reference:
    """A PyTorch model with a head of random weights, and where both are saved."""

    path: Path
    model: PreTrainedModel
    head: ReferenceHead | AppendedHead

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """``[T, vocabulary]``."""
        return self.model(torch.tensor([list(tokens)])).logits[0].numpy()

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], depth: int) -> np.ndarray:
        """Logits ``[T - depth, vocabulary]`` of the token ``depth + 1`` ahead of each position."""
        ids = torch.tensor([list(tokens)])
        text = _text(self.model)
        hidden = text(ids).last_hidden_state
        for ahead in range(1, depth + 1):
            embeddings = text.embed_tokens(ids[:, ahead:])
            hidden = self.head(embeddings, hidden[:, : embeddings.shape[1]], text.rotary_emb)
        return self.model.lm_head(hidden)[0].numpy()

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """What transformers generates for one prompt alone."""
        generated = self.model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=tokens, do_sample=False
        )
        return generated[0, len(prompt) :].tolist()


def build(family: str, path: Path, *, fused_head: bool = False) -> Reference:
    """Make a family's model, random, and save it the way transformers does, with a head.

    Args:
        fused_head: whether a head's experts are saved fused, or apart; both are published.
    """
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    text = _text(model)
    head = (AppendedHead(text) if family == "glm" else ReferenceHead(text)).eval()
    _spread(model)
    _spread(head)
    model.save_pretrained(path)
    if isinstance(head, AppendedHead):
        named = head.published(len(text.layers))
    else:
        named = {f"mtp.{name}": value for name, value in head.state_dict().items()}
    save_file(named if fused_head else _experts_apart(named), path / "model-mtp.safetensors")
    _publish_config(path / "config.json")
    write_tokenizer(path)
    return Reference(path, model, head)


def _text(model: PreTrainedModel) -> torch.nn.Module:
    return getattr(model.model, "language_model", model.model)


@torch.no_grad()
def _spread(module: torch.nn.Module) -> None:
    """Make weights random enough that every part of a layer matters to the logits.

    The recurrence is made to forget slowly: its output, when tiny, is normalised up again, and
    the rounding in it too.
    """
    for name, weight in module.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            weight.normal_(-1, 0.5)
        elif weight.ndim == 1:
            weight.add_(0.1 * torch.randn_like(weight))
        else:
            weight.normal_(0, 2 * weight[0].numel() ** -0.5)


def _experts_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    apart = {}
    for name, value in weights.items():
        layer, _, fused = name.partition(".experts.")
        if not fused:
            apart[name] = value
            continue
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        for part, matrices in zip(parts, value.chunk(len(parts), dim=1), strict=True):
            for expert, matrix in enumerate(matrices):
                apart[f"{layer}.experts.{expert}.{part}.weight"] = matrix.contiguous()
    return apart


def _publish_config(path: Path) -> None:
    """Give a saved configuration the fields that published ones have and mlx-lm reads."""
    config: dict[str, Any] = json.loads(path.read_text())
    if config["model_type"] == "qwen3_next":
        config |= {key: _ROPE[key] for key in ("rope_theta", "partial_rotary_factor")}
    elif config["model_type"] == "glm4_moe_lite":
        config["num_nextn_predict_layers"] = 1
    else:
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(config))


@torch.no_grad()
def reference_vector(path: Path, text: str) -> np.ndarray:
    """The vector ``[D]`` of a text, by transformers' network and the modules of a checkpoint."""
    tokens = AutoTokenizer.from_pretrained(path)(text).input_ids
    hidden = AutoModel.from_pretrained(path).eval()(torch.tensor([tokens])).last_hidden_state[0]
    pooling = json.loads((path / "1_Pooling/config.json").read_text())
    vector = hidden.mean(0) if pooling["pooling_mode_mean_tokens"] else hidden[-1]
    for folder in sorted(path.glob("*_Dense")):
        vector = load_file(folder / "model.safetensors")["linear.weight"] @ vector
    return (vector / vector.norm()).numpy()
