"""Compare each implementation that the device uses with its plain form.

    python -m scripts.bench.kernel_check
    python -m scripts.bench.kernel_check attention products

Prints the largest absolute difference of each comparison. Exits with 1 if one is beyond its
tolerance, a share of the largest wanted value. The heads have the sizes of published models. Runs
on every device; where the device's form is the plain one, the differences are 0.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

# Reduced precision of float32 products would hide what the kernels do.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_5 import GatedDeltaNet, Model, ModelArgs, TextModelArgs

from omlx_worker.engine.caches.layout import capacity_for
from omlx_worker.engine.kernels.delta_rule import Inputs
from omlx_worker.engine.kernels.device import Kernels, for_device
from omlx_worker.engine.kernels.window import TAIL, Window
from omlx_worker.engine.models.mtp import with_head
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.row import Row, Sampling

SLOTS, KEY_HEADS, HEADS, DK, DV, HIDDEN = 4, 16, 32, 128, 128, 512
ACCEPTED = mx.array([0, 1, 2, 3])
TOLERANCES = {mx.float32: 2e-4, mx.bfloat16: 2e-2}

TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": KEY_HEADS,
    "linear_key_head_dim": DK,
    "linear_value_head_dim": DV,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "full_attention_interval": 4,
    "max_position_embeddings": 1024,
    "mtp_num_hidden_layers": 1,
}

Comparison = tuple[str, Sequence[mx.array], Sequence[mx.array]]
"""What is compared, what the device's form gives, and what the plain form gives."""


def inputs(width: int, dtype: mx.Dtype, slots: int = SLOTS) -> Inputs:
    """Random inputs of the rule: unit queries and keys, gates between 0 and 1."""

    def unit() -> mx.array:
        vectors = mx.random.normal((slots, width, KEY_HEADS, DK))
        return (vectors / mx.linalg.norm(vectors, axis=-1, keepdims=True)).astype(dtype)

    gates = (slots, width, HEADS)
    values = mx.random.normal((*gates, DV)).astype(dtype)
    return Inputs(
        unit(), unit(), values, mx.random.uniform(0.5, 1, gates), mx.random.uniform(0, 1, gates)
    )._replace(beta=mx.random.uniform(0, 1, gates).astype(dtype))


def rule(device: Kernels, plain: Kernels, dtype: mx.Dtype) -> Iterator[Comparison]:
    for width in (1, 2, 4):
        for depth in (0, 3):
            window, kept = inputs(width, dtype), inputs(1 + depth, dtype).kept if depth else None
            state = mx.random.normal((SLOTS, HEADS, DV, DK))
            wanted = plain.rule.replay_and_run(window, kept, ACCEPTED, state)
            mx.eval(wanted)
            # After the plain form, since a kernel may overwrite the state.
            got = device.rule.replay_and_run(window, kept, ACCEPTED, state)
            yield f"rule, window of {width}, {depth} kept drafts", got, wanted
    for width in (1, 8, 9, 64, 300):
        prompt = inputs(width, dtype, slots=1)
        state = mx.random.normal((1, HEADS, DV, DK))
        logs = mx.log(prompt.decay)
        wanted = plain.rule.read(prompt, logs, state)
        yield f"rule, prompt of {width}", device.rule.read(prompt, logs, state), wanted


def net_inputs(device: Kernels, plain: Kernels, dtype: mx.Dtype) -> Iterator[Comparison]:
    fields = set(TextModelArgs.__dataclass_fields__)
    net = GatedDeltaNet(TextModelArgs(**{k: v for k, v in TEXT.items() if k in fields}))
    net.set_dtype(dtype)
    forms = [kernels.net_inputs(net) for kernels in (device, plain)]
    conv = mx.random.normal((SLOTS, net.conv_kernel_size - 1, net.conv_dim)).astype(dtype)
    for width, depth, prompt in ((1, 0, False), (4, 0, False), (3, 3, False), (40, 0, True)):
        x, before = (mx.random.normal((SLOTS, n, HIDDEN)).astype(dtype) for n in (width, 1 + depth))
        out = mx.random.normal((SLOTS, width, HEADS, DV)).astype(dtype)
        found: list[list[mx.array]] = []
        for form in forms:
            projected, past = form.project(x), form.project(before)[0] if depth else None
            window, after = form.prepare(projected, conv, past, None if prompt else ACCEPTED)
            found.append([*window, after, form.log_decay(projected), form.gated(out, projected)])
        name = "prompt" if prompt else "window"
        yield f"net inputs, {name} of {width}, {depth} kept drafts", *found


def products(device: Kernels, plain: Kernels, dtype: mx.Dtype) -> Iterator[Comparison]:
    layers = [nn.Linear(HIDDEN, 256, bias=False), nn.Linear(HIDDEN, 256, bias=False)]
    embedding = nn.Embedding(512, HIDDEN)
    for layer in (*layers, embedding):
        layer.set_dtype(dtype)
    for rows in (1, 3, 8, 9, 16, 17):
        x = mx.random.normal((rows, HIDDEN)).astype(dtype)
        added = mx.random.normal((rows, 256)).astype(dtype)
        found: list[list[mx.array]] = []
        for kernels in (device, plain):
            one, scores = kernels.product(layers[0]), kernels.product(embedding)
            found.append([one(x), one(x, added), scores(x)])
        yield f"product, {rows} rows", *found
        fused, gated = device.fuse(layers), device.fuse(layers, gated=True)
        if fused is not None and gated is not None:
            gate, up = (layer(x) for layer in layers)
            wanted = [mx.concatenate([gate, up], axis=-1), nn.silu(gate) * up]
            yield f"fused product, {rows} rows", [fused(x), gated(x)], wanted


def attention(device: Kernels, plain: Kernels, dtype: mx.Dtype) -> Iterator[Comparison]:
    """Layers with and without sliding windows, sinks and capped scores."""
    layers: list[dict[str, Any]] = [
        {},
        {"sliding": 512, "ring": 512},
        {"sinks": mx.random.normal((16,)).astype(dtype)},
        {"softcap": 2.0},
    ]
    for size, options, width, context in product(
        (64, 128, 256, 512), layers, (1, 4, 9), (0, 700, 5000)
    ):
        lengths = mx.array([context * slot // 3 for slot in range(SLOTS)], mx.int32)
        capacity = capacity_for(context)
        window = Window.at(lengths + ACCEPTED, lengths, width, ((SLOTS, capacity),))
        body = min(capacity, options.get("ring", capacity))
        arrays = [mx.random.normal((SLOTS, 4, n, size)) for n in (TAIL, TAIL, body, body)]
        new = [mx.random.normal((SLOTS, 4, width, size)).astype(dtype) for _ in range(2)]
        queries = mx.random.normal((SLOTS, 16, width, size)).astype(dtype)
        found: list[list[mx.array]] = []
        for kernels in (device, plain):
            tail_keys, tail_values, *bodies = (array.astype(dtype) for array in arrays)
            tails = kernels.attention.put((tail_keys, tail_values), *new, window)
            mixed = kernels.attention.attend(
                queries, [tuple(bodies)], tails, window, size**-0.5, **options
            )
            found.append([mixed, *tails])
        of = ", ".join(options) or "plain"
        yield f"attention, heads of {size}, window of {width} after {context}, {of}", *found


def model(device: Kernels, plain: Kernels, dtype: mx.Dtype) -> Iterator[Comparison]:
    """A small random model with a head: a prompt, then windows with replays."""
    network = with_head(Model)(ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": TEXT}))
    network.set_dtype(dtype)
    tokens = mx.random.randint(0, 512, (SLOTS, 24))
    found = [_decoded(RaggedQwen35(network, kernels=k), tokens) for k in (device, plain)]
    yield "model, a prompt and windows of 4, 3 and 1", *found


def _decoded(ragged: RaggedQwen35, tokens: mx.array) -> list[mx.array]:
    prompt = [*tokens[0, :21].tolist()]  # type: ignore[misc]
    reading = Reading(Row("", prompt, 1, Sampling()), prompt)
    read(ragged, [reading], [reading.left])
    found = [array for arrays in reading.layers for array in arrays]
    caches, cursors = ragged.new_caches(SLOTS, 256), mx.zeros((SLOTS,), mx.int32)
    lengths, accepted = cursors, cursors
    for width in (4, 3, 1):
        window = Window.at(cursors, lengths, width, ((SLOTS, 256),))
        hidden = ragged.forward(tokens[:, :width], caches, window, accepted)
        drafts = ragged.draft(tokens[:, 1 : width + 1], hidden, caches, window)
        found += [ragged.logits(hidden), ragged.logits(drafts)]
        accepted = mx.minimum(ACCEPTED, width - 1)
        cursors = cursors + 1 + accepted
    return found


PARTS = (attention, rule, net_inputs, products, model)


def main() -> int:
    mx.random.seed(0)
    asked = sys.argv[1:]
    parts = [part for part in PARTS if not asked or part.__name__ in asked]
    if len(parts) < len(set(asked)):
        sys.exit(f"got {' '.join(asked)}; give any of {' '.join(part.__name__ for part in PARTS)}")
    on_cpu = mx.default_device() == mx.cpu
    device, plain = for_device(DK, DV), Kernels()
    failed = False
    for dtype in (mx.float32,) if on_cpu else (mx.float32, mx.bfloat16):
        for part in parts:
            # A model adds up the differences of its layers.
            tolerance = TOLERANCES[dtype] * (3 if part is model else 1)
            for name, got, wanted in part(device, plain, dtype):
                failed |= not agree(f"{dtype}: {name}", got, wanted, tolerance)
    print("FAILED" if failed else "all agree")
    return int(failed)


def agree(name: str, got: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> bool:
    """Whether arrays agree; prints the difference that comes closest to its limit."""
    found: list[tuple[float, float, float]] = []
    for mine, theirs in zip(got, wanted, strict=True):
        mine, theirs = mine.astype(mx.float32), theirs.astype(mx.float32)
        difference = mx.abs(mine - theirs).max().item()
        limit = tolerance * max(1e-3, mx.abs(theirs).max().item())
        share = difference / limit
        found.append((math.inf if math.isnan(share) else share, difference, limit))
    share, difference, limit = max(found)
    print(f"{name:64} {difference:8.1e} of {limit:7.1e}  {'ok' if share <= 1 else 'FAILED'}")
    return share <= 1


if __name__ == "__main__":
    sys.exit(main())
