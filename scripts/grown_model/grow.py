"""Grow the demo model to the cost of a 0.8B or a 4B Qwen3.5 while it goes on saying the same.

    python -m scripts.grown_model.grow --size 4b --out PATH
    python -m scripts.grown_model.grow --size 0.8b --out PATH --check
    python -m scripts.grown_model.grow --size 4b --out PATH --tower

Random weights accept no drafts and small models cost nothing; a grown model does both. What its
outputs do not depend on is random, the rest is the demo model's, laid out so that nothing has
to be rounded anew (`Layout` says how). ``--check`` compares it with the demo model, token for
token, and how often drafts are accepted at each place. With ``--real-head`` that is as often as a
large model's are; without, more often. With ``--tower`` it takes pictures, and cannot say what is
on them: its vision tower has random weights, in the shape of one of that size.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.loader import load
from omlx_worker.engine.models.mtp import with_head
from scripts.grown_model.check import compare
from scripts.grown_model.layout import Layout, Map, grown_layers
from tests.helpers.pictured_demo import add_sight

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "intermediate_size": 640,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 5000,
    },
    "0.8b": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
    },
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
    },
}
"""Shapes of published Qwen3.5 models of that size; ``tiny`` is for tests."""

TOWERS: dict[str, dict[str, int]] = {
    name: {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_heads": hidden // 64,
        "num_position_embeddings": 48**2,
    }
    for name, depth, hidden in (("tiny", 6, 256), ("0.8b", 12, 768), ("4b", 24, 1024))
}
"""Shapes of their vision towers."""

PICTURES = {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}}
"""Between 64 and 16,384 vectors each, as Qwen3.5 has them."""

UNLIKELY = 15 * 2.0**13
"""What an unused token's score is lowered by, a multiple of a positive feature; 15 times a power
of two, so that 4-bit quantisation keeps it and the zeros beside it exact."""


REAL = (0.28, 0.5)
"""Spread of the errors in what the head predicts, and in what it goes on from.

So drafts at places 1 to 3 are accepted in 0.87, 0.70 and 0.51 of greedy steps, over 24 texts of 64
tokens. Those of a 27B are in 0.86, 0.66 and 0.51."""


REAL_HEAD = "let drafts be accepted as a 27B's are: 0.86, 0.66, 0.51 at places 1 to 3"


class Grower:
    """Makes the weights of a grown model from those of the demo model.

    Args:
        errors: spreads of the head's errors, see `REAL`.
    """

    def __init__(
        self,
        weights: dict[str, mx.array],
        layout: Layout,
        errors: tuple[float, float] = (0, 0),
        seed: int = 0,
    ) -> None:
        self.weights = {name: np.array(w.astype(mx.float32)) for name, w in weights.items()}
        self.layout = layout
        noise = np.random.default_rng(seed).normal(size=(2, layout.old.hidden_size))
        self.gains = 1 + np.array(errors)[:, None] * noise
        mx.random.seed(seed)

    def tensor(self, name: str, old: str | None) -> mx.array:
        """One weight of the grown model; ``old`` names the demo's, None in an added layer."""
        rows, columns, random = self._maps(name)
        ends = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        source = self.weights[old or name]
        shape = (len(rows), *source.shape[1:])
        if source.ndim == 2:
            shape = (len(rows), len(columns))
        grown = mx.zeros(shape)
        if random and not ends:
            grown = 0.02 * mx.random.normal(shape)
        if old is not None:
            known, block = np.flatnonzero(rows >= 0), source[rows[rows >= 0]]
            if source.ndim == 2:
                block = np.where(columns >= 0, block[:, columns], 0)
            grown[mx.array(known)] = mx.array(block)
        return self._adjusted(name, grown.astype(mx.bfloat16), added=old is None)

    def _maps(self, name: str) -> tuple[Map, Map, bool]:
        """The maps of a weight's rows and columns, and whether what is free may be random."""
        at = self.layout
        nothing = np.zeros(0, int)
        # The head's projection reads two states side by side.
        state = np.where(at.goes_on < 0, -1, at.goes_on + at.old.hidden_size)
        both = np.concatenate([at.reads, state])
        for end, maps in {
            "embed_tokens.weight": (at.tokens, at.writes, True),
            "lm_head.weight": (at.tokens, at.reads, False),
            "mtp.fc.weight": (at.writes, both, False),
            "q_proj.weight": (at.queries, at.reads, True),
            "k_proj.weight": (at.keys, at.reads, True),
            "v_proj.weight": (at.values, at.reads, True),
            "o_proj.weight": (at.writes, at.attended, False),
            "q_norm.weight": (at.head, nothing, False),
            "k_norm.weight": (at.head, nothing, False),
            "in_proj_qkv.weight": (at.qkv, at.reads, True),
            "in_proj_z.weight": (at.gates, at.reads, True),
            "in_proj_a.weight": (at.states, at.reads, True),
            "in_proj_b.weight": (at.states, at.reads, True),
            "conv1d.weight": (at.qkv, nothing, True),
            "A_log": (at.states, nothing, False),
            "dt_bias": (at.states, nothing, False),
            "linear_attn.norm.weight": (at.value, nothing, False),
            "out_proj.weight": (at.writes, at.mixed, False),
            "gate_proj.weight": (at.mlp, at.reads, True),
            "up_proj.weight": (at.mlp, at.reads, True),
            "down_proj.weight": (at.writes, at.mlp, False),
        }.items():
            if name.endswith(end):
                return maps
        return at.writes, nothing, False

    def _adjusted(self, name: str, grown: mx.array, *, added: bool) -> mx.array:
        """The few places where a grown weight is more than the old one laid out."""
        at = self.layout
        if name.endswith("q_norm.weight"):
            grown = grown * (at.new.head_dim / at.old.head_dim) ** 0.5
        elif name.endswith("k_norm.weight"):
            grown[mx.array(np.flatnonzero(~at.used))] = 0
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")) and not added:
            grown[mx.array(np.flatnonzero(at.silent))] = 0
        elif name == "mtp.norm.weight":
            for copy, gains in zip((at.reads, at.goes_on), self.gains, strict=True):
                grown = grown * mx.array(np.where(copy < 0, 1, gains[copy])).astype(grown.dtype)
        if at.padded:
            self._set_constant(name, grown)
        return grown

    def _set_constant(self, name: str, grown: mx.array) -> None:
        """Carry the constant that unused tokens are scored by through to the last place."""
        at = self.layout
        if name.endswith("embed_tokens.weight"):
            column = self.weights[name][:, at.old.hidden_size - 1]
            grown[:, -1] = float(2.0 ** np.round(np.log2(np.sqrt(np.mean(column**2)))))
        elif name == "mtp.fc.weight":
            grown[-1, at.new.hidden_size - 1] = 2.0**-6
        elif name.endswith("lm_head.weight"):
            grown[at.old.vocab_size :, -1] = -UNLIKELY
        elif grown.shape == (at.new.hidden_size,):
            grown[-1] = 1.0


def grow(
    network: nn.Module, config: dict[str, Any], size: str, *, real_head: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The demo model, loaded, at another size: a loaded model and its configuration.

    Args:
        real_head: whether drafts are accepted as those of a large model, see `REAL`.
    """
    text = config["text_config"] | SIZES[size]
    old = network.language_model.args
    text |= {
        "rms_norm_eps": old.rms_norm_eps / 4,
        "tie_word_embeddings": False,
        "layer_types": [
            "linear_attention" if (n + 1) % text["full_attention_interval"] else "full_attention"
            for n in range(text["num_hidden_layers"])
        ],
    }
    grown_config = config | {"text_config": text, "tie_word_embeddings": False}
    family, args = _get_classes(grown_config)
    grown = with_head(family)(args.from_dict(json.loads(json.dumps(grown_config))))
    new = grown.language_model.args

    weights = dict(tree_flatten(network.parameters()))
    weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"]
    grower = Grower(weights, Layout(old, new), REAL if real_head else (0, 0))
    sources = grown_layers(
        old.num_hidden_layers, new.num_hidden_layers, new.full_attention_interval
    )
    made = []
    for name, _ in tree_flatten(grown.parameters()):
        tensor = _from_old(grower, name, sources)
        mx.eval(tensor)
        made.append((name, tensor))
    grown.load_weights(made)
    grown.eval()
    return grown, grown_config


def _from_old(grower: Grower, name: str, sources: list[int]) -> mx.array:
    prefix = "language_model.model.layers."
    if not name.startswith(prefix):
        return grower.tensor(name, name)
    number, _, rest = name[len(prefix) :].partition(".")
    source = sources[int(number)]
    if source >= 0:
        return grower.tensor(name, f"{prefix}{source}.{rest}")
    # An added layer takes its shapes from one of its kind; what it adds to the stream is zero.
    kind = int(number) % grower.layout.new.full_attention_interval
    grower.weights.setdefault(name, grower.weights[f"{prefix}{kind}.{rest}"])
    grown = grower.tensor(name, None)
    return mx.ones_like(grown) if rest.endswith("norm.weight") else grown


def save(grown: nn.Module, config: dict[str, Any], out: Path) -> None:
    """Write a checkpoint that this project and mlx-lm load."""
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(grown.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(resolve(DEMO) / name, out / name)
    shutil.copy(resolve(DEMO) / "chat_template.jinja", out / "chat_template.jinja")


def add_tower(path: Path, size: str) -> None:
    """Let a checkpoint that `save` has written take pictures."""
    add_sight(path, pictures=PICTURES, dtype=mx.bfloat16, **TOWERS[size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--out", type=Path, required=True, help="directory of the new checkpoint")
    parser.add_argument("--real-head", action="store_true", help=REAL_HEAD)
    parser.add_argument("--tower", action="store_true", help="let it take pictures")
    parser.add_argument("--check", action="store_true", help="compare it with the demo model")
    parser.add_argument("--prompts", type=int, default=8, help="of the comparison")
    parser.add_argument("--tokens", type=int, default=64, help="of the comparison, a prompt")
    args = parser.parse_args()
    network, tokenizer, config = load(resolve(DEMO))
    grown, grown_config = grow(network, config, args.size, real_head=args.real_head)
    save(grown, grown_config, args.out)
    if args.tower:
        add_tower(args.out, args.size)
    if args.check:
        print(compare(network, load(args.out)[0], tokenizer, args.prompts, args.tokens))


if __name__ == "__main__":
    main()
