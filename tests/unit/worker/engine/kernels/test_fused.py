"""Projections side by side: the same numbers in fewer products, and no weight held twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from omlx_worker.engine.kernels.cuda.products import fuse, product
from omlx_worker.engine.kernels.cuda.side_by_side import side_by_side
from omlx_worker.engine.kernels.device import Kernels
from omlx_worker.engine.kernels.plain.products import Product
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import Loaded, row, run

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="takes CUDA's way by hand")


def layers(*sizes: int, bits: int | None = None, bias: bool = False) -> list[nn.Module]:
    made: list[nn.Module] = [nn.Linear(64, size, bias=bias) for size in sizes]
    if bits is not None:
        made = [nn.QuantizedLinear.from_linear(layer, 64, bits) for layer in made]
    return made


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_side_by_side_put_out_what_they_do_apart(bits: int | None) -> None:
    apart = layers(96, 32, 8, bits=bits)
    x = mx.random.normal((3, 64))
    before = [layer(x) for layer in apart]
    mx.eval(before)

    whole = side_by_side(apart)

    assert whole is not None
    assert mx.allclose(whole(x), mx.concatenate(before, axis=-1), 1e-5, 1e-5).item()
    assert all(
        mx.allclose(layer(x), out, 1e-5, 1e-5).item()
        for layer, out in zip(apart, before, strict=True)
    )


def test_layers_of_many_kinds_or_with_a_bias_are_left_apart() -> None:
    assert side_by_side(layers(8, 8, bias=True)) is None
    assert side_by_side([*layers(8), *layers(8, bits=4)]) is None
    assert side_by_side([*layers(8, bits=8), *layers(8, bits=4)]) is None


def test_weights_are_held_once_also_when_put_side_by_side_again() -> None:
    apart = layers(4096, 4096)
    whole = side_by_side(apart)
    mx.clear_cache()
    once = mx.get_active_memory()

    assert side_by_side(apart) is whole

    assert mx.get_active_memory() == once
    assert sum(w.nbytes for _, w in tree_flatten(apart[0].parameters())) == 4096 * 64 * 4


def test_weights_that_were_changed_are_put_side_by_side_anew() -> None:
    apart = layers(16, 16)
    side_by_side(apart)
    for layer in apart:
        layer.weight = 2 * layer.weight
    x = mx.random.normal((1, 64))

    whole = side_by_side(apart)

    assert whole is not None
    assert mx.allclose(whole(x), mx.concatenate([layer(x) for layer in apart], axis=-1)).item()


@on_cpu
def test_fused_layers_decode_what_mlx_lm_does(tmp_path: Path) -> None:
    loaded = Loaded.at(write_qwen(tmp_path))
    rows = [row("a", [1, 2, 3, 4, 5], 24), row("b", list(range(40)), 24)]
    wanted = {r.row_id: loaded.greedy(r.prompt, 24) for r in rows}
    fused: list[int] = []

    def counted(layers: Sequence[Any], *, gated: bool = False) -> Product | None:
        fused.append(len(layers))
        return fuse(layers, gated=gated)

    model = as_ragged(loaded.network, kernels=Kernels(product=product, fuse=counted))

    assert model is not None
    # An MLP each in four layers and the head's, and attention in one of them and the head's.
    assert sorted(fused) == [2] * 5 + [3] * 2
    assert run(RaggedDecoder(model, 2), rows) == wanted
