"""Checkpoints of embeddings as sentence-transformers lays them out: a network and modules after it.

``modules.json`` names the modules in their order, each with a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.models.embedder import Embedder as Embedder
from omlx_worker.engine.models.embedder import normalize
from omlx_worker.engine.rows.interface import ModelError

MODULES = "modules.json"

FAMILIES = ("qwen3", "gemma3_text")
_OLD_MODE = "pooling_mode_"
_MODES = {"lasttoken": False, "last": False, "mean": True, "mean_tokens": True}
_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": nn.Identity(),
    "Tanh": mx.tanh,
}


def embeds(path: Path) -> bool:
    """Whether a checkpoint is one of embeddings."""
    return (path / MODULES).is_file()


def nested(model_class: type[nn.Module]) -> type[nn.Module]:
    """A class of mlx-lm that takes the names of a network saved without its scores too."""

    class Nested(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> Any:
            weights = {
                name if name.startswith("model.") else f"model.{name}": weight
                for name, weight in weights.items()
                if not name.startswith("lm_head.")
            }
            sanitize = getattr(super(), "sanitize", lambda weights: weights)
            return sanitize(weights)

    return Nested


def prepare(network: nn.Module) -> None:
    """Let the embeddings of a network in float32 have the scale that the family means.

    mlx-lm rounds that of Gemma to bfloat16, which weights in half precision do anyway.
    """
    embedding = network.model.embed_tokens
    if network.model_type == "gemma3_text" and embedding.weight.dtype == mx.float32:
        scale = network.args.hidden_size**0.5
        embedding.weight = embedding.weight * (scale / mx.array(scale, mx.bfloat16).item())


def read_embedder(path: Path, config: Mapping[str, Any]) -> Embedder:
    """What follows the network of a checkpoint.

    Raises:
        ModelError: if it is of another family, or one of its modules is not served.
    """
    family, both_ways = config["model_type"], bool(config.get("use_bidirectional_attention"))
    if family not in FAMILIES:
        raise _refused(path, f"its family is {family}", f"one of {' or '.join(FAMILIES)}")
    try:
        modules = json.loads((path / MODULES).read_text())
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or modules[0]["path"]:
            raise _refused(path, f"its modules begin with {', '.join(kinds[:2])}", _REMEDY)
        mean = _averages(path, _config(path / modules[1]["path"]))
        size, layers = config["hidden_size"], list[Callable[[mx.array], mx.array]]()
        for kind, module in zip(kinds[2:], modules[2:], strict=True):
            if kind == "Normalize":
                layers.append(normalize)
            elif kind == "Dense":
                linear, activation = _dense(path, path / module["path"])
                size = linear.weight.shape[0]
                layers += [linear, activation]
            else:
                raise _refused(path, f"it has the module {kind}", _REMEDY)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        kind = type(error).__name__
        raise _refused(path, f"{MODULES} or its folders cannot be read ({kind})", _REMEDY) from None
    return Embedder(size, mean, both_ways, layers)


_REMEDY = "one with Transformer, Pooling of the last token or the mean, Dense and Normalize alone"


def _refused(path: Path, what: str, remedy: str) -> ModelError:
    return ModelError(f"--model {path}: no vectors can be made with it, for {what}; give {remedy}")


def _config(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return read


def _averages(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether the states of all tokens are averaged, by the newer or the older form."""
    modes = [
        name.removeprefix(_OLD_MODE)
        for name, on in config.items()
        if name.startswith(_OLD_MODE) and on is True
    ]
    mode = config.get("pooling_mode") or modes
    named = mode if isinstance(mode, list) else [mode]
    if len(named) != 1 or named[0] not in _MODES or config.get("include_prompt") is False:
        raise _refused(path, f"its pooling is {', '.join(named) or 'none'}", _REMEDY)
    return _MODES[named[0]]


def _dense(path: Path, folder: Path) -> tuple[nn.Linear, Callable[[mx.array], mx.array]]:
    """A linear layer in float32, and the activation of its sums."""
    config = _config(folder)
    activation = str(config.get("activation_function")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise _refused(path, f"its Dense has the activation {activation}", _REMEDY)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    linear = nn.Linear(1, 1, bias=config.get("bias", True))
    for name in linear.parameters():
        linear[name] = weights[f"linear.{name}"].astype(mx.float32)
    return linear, _ACTIVATIONS[activation]
