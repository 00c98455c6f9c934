"""A tiny Gemma 4 with a vision tower and random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.towers import Tower, read_tower
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.picture_file import pixels_of, size_of
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.towers.gemma4 import Gemma4Tower
from tests.helpers.checkpoints import write_tokenizer
from tests.helpers.decoding import GREEDY, Loaded
from tests.helpers.families import SLIDING, config_of, tiny

VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 256,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}
"""A vector for 8 pixels, each way."""
CLIPPED = {"use_clipped_linears": True, "standardize": True, "num_key_value_heads": 2}
"""What some of the published towers have, and heads that share keys."""

PICTURES = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}
HIDDEN, VOCABULARY = 64, 264
IMAGE, BEGIN, END = 260, 261, 262
_BOUNDS = {"input_min": -3.0, "input_max": 2.5, "output_min": -2.0, "output_max": 3.0}


def config_with(vision: Mapping[str, Any], **text: Any) -> dict[str, Any]:
    """The configuration of a checkpoint, with these differences."""
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY)
    whole = config_of("gemma4_text") | sizes | text
    return {
        "model_type": "gemma4",
        # transformers warns of a name that it no longer has.
        "text_config": {name: value for name, value in whole.items() if name != "rope_scaling"},
        "vision_config": VISION | vision,
        "vocab_size": VOCABULARY,
        "image_token_id": IMAGE,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
    }


def weights_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Of a tower, by Hugging Face's names, so large that softmax, norms and bounds matter."""
    vision, draw = config["vision_config"], np.random.default_rng(seed).standard_normal
    size, inner, dims = (vision[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (vision[f"num_{n}_heads"] * dims for n in ("attention", "key_value"))
    values = {
        "vision_tower.patch_embedder.input_proj.weight": draw(
            (size, 3 * vision["patch_size"] ** 2)
        ),
        "vision_tower.patch_embedder.position_embedding_table": draw(
            (2, vision["position_embedding_size"], size)
        ),
        "embed_vision.embedding_projection.weight": draw((HIDDEN, size)) / size**0.5,
    }
    if vision.get("standardize"):
        values |= {f"vision_tower.std_{name}": 1 + 0.3 * draw(size) for name in ("bias", "scale")}
    for n in range(vision["num_hidden_layers"]):
        layer = f"vision_tower.encoder.layers.{n}"
        for name in (
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ):
            values[f"{layer}.{name}.weight"] = 1 + 0.3 * draw(size)
        for name in ("q_norm", "k_norm"):
            values[f"{layer}.self_attn.{name}.weight"] = 1 + 0.3 * draw(dims)
        for name, shape in {
            "self_attn.q_proj": (queries, size),
            "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size),
            "self_attn.o_proj": (size, queries),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }.items():
            values[f"{layer}.{name}.linear.weight"] = 2 * draw(shape) / shape[1] ** 0.5
            if vision.get("use_clipped_linears"):
                values |= {f"{layer}.{name}.{end}": np.array(at) for end, at in _BOUNDS.items()}
    return {name: mx.array(value.astype(np.float32)) for name, value in values.items()}


def tower_with(vision: Mapping[str, Any], **text: Any) -> Gemma4Tower:
    """The tower of a model with these differences."""
    config = config_with(vision, **text)
    return Gemma4Tower(config, PICTURES, None, weights_of(config))


def write_gemma(path: Path, vision: Mapping[str, Any] = {}, **text: Any) -> Path:
    """A checkpoint with Hugging Face's names.

    Args:
        vision, text: what its configurations have else.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = config_with(vision, **text)
    network = tiny("gemma4_text", **config["text_config"])
    weights = {}
    for name, value in tree_flatten(network.parameters()):
        # Spread out, so that greedy choices are far from ties. Larger embeddings would outweigh the
        # layers, and each token would repeat itself.
        scale = 0.3 if "embed_tokens.w" in name else 3 if value.ndim > 1 else 1
        weights[name.replace("model.", "model.language_model.", 1)] = value * scale
    weights |= {f"model.{name}": value for name, value in weights_of(config).items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "processor_config.json").write_text(json.dumps({"image_processor": PICTURES}))
    write_tokenizer(path)
    return path


@dataclass(frozen=True)
class Gemma:
    """A tiny Gemma 4 with its tower. Its last two layers of four read what others keep."""

    loaded: Loaded
    tower: Tower

    @classmethod
    def at(cls, path: Path) -> Gemma:
        loaded = Loaded.at(path)
        tower = read_tower(path, loaded.config, None)
        assert tower is not None
        return cls(loaded, tower)

    def decoder(self, *, keeps: bool = False) -> RaggedDecoder:
        model = as_ragged(self.loaded.network, checks=False, tower=self.tower)
        kept = partial(PrefixCache, LayerSpecs.of(model), 1 << 30) if keeps else None
        return RaggedDecoder(model, 0, 0, kept)

    def request(self, name: str, tokens: int, *parts: list[int] | bytes) -> RowRequest:
        """A row of tokens and files of pictures, in this order."""
        prompt, pictures = list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, bytes):
                prompt.append(BEGIN)
                grid = self.tower.grid(*size_of(part))
                picture = Picture(
                    len(prompt), *grid, part, spatial=False, both_ways=self.tower.both_ways
                )
                prompt += [*[IMAGE] * picture.count, END]
                pictures.append(picture)
            else:
                prompt += part
        return RowRequest(name, prompt, tokens, GREEDY, pictures=tuple(pictures))

    def likeliest(self, request: RowRequest, text: Sequence[int]) -> list[int]:
        """The likeliest token at each place of a text, by a forward over all of it, layer by layer.

        In layers with a sliding window the tokens of a picture also see those after them, as in
        transformers' ``create_masks_for_vision_model``.
        """
        network: Any = self.loaded.network.language_model
        net, ids = network.model, mx.array([[*request.prompt, *text[:-1]]])
        hidden = net.embed_tokens(ids) * net.embed_scale
        shows = mx.zeros((ids.size,), mx.int32)
        for number, each in enumerate(request.pictures, 1):
            hidden[0, each.start : each.end] = self.tower.see(pixels_of(each.data))
            shows[each.start : each.end] = number
        own = net._get_per_layer_inputs(mx.where(shows, 0, ids))
        own = net._project_per_layer_inputs(hidden, own)
        places = mx.arange(ids.size)
        back = near = places <= places[:, None]
        if self.tower.both_ways:
            near = back | ((shows == shows[:, None]) & (shows > 0))
        near = near & (places > places[:, None] - SLIDING)
        kept = dict[int, Any]()
        for n, layer in enumerate(net.layers):
            mask = near if layer.layer_type == "sliding_attention" else back
            shared, offset = kept.get(net.previous_kvs[n], (None, None))
            hidden, *kept[n] = layer(
                hidden, mask, per_layer_input=own[:, :, n], shared_kv=shared, offset=offset
            )
        scores = net.embed_tokens.as_linear(net.norm(hidden[0, -len(text) :]))
        likeliest: list[int] = scores.argmax(axis=-1).tolist()
        return likeliest
