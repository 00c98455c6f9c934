"""Projections side by side: the same numbers in fewer products, and no weight held twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from omlx_worker.engine.kernels import forms
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.products import Product, product
from omlx_worker.engine.kernels.side_by_side import side_by_side
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.self_check import difference
from omlx_worker.engine.models.served_layers import run_together
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import Loaded, row, run
from tests.helpers.families import tiny

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="takes CUDA's way by hand")


def layers(*sizes: int, bits: int | None = None, bias: bool = False) -> list[nn.Module]:
    made: list[nn.Module] = [nn.Linear(64, size, bias=bias) for size in sizes]
    if bits is not None:
        made = [nn.QuantizedLinear.from_linear(layer, 64, bits) for layer in made]
    return made


def mixed_bits(network: nn.Module, wide: str) -> None:
    """Quantise to 4 bits, and to 6 what has ``wide`` in its name."""

    def bits(path: str, part: Any) -> dict[str, int] | bool:
        fits = hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0
        return fits and {"group_size": 32, "bits": 6 if wide in path else 4}

    nn.quantize(network, class_predicate=bits)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_layers_side_by_side_put_out_what_they_do_apart(bits: int | None, bias: bool) -> None:
    apart = layers(96, 32, 8, bits=bits, bias=bias)
    x = mx.random.normal((3, 64))
    before = [layer(x) for layer in apart]
    mx.eval(before)

    (whole,) = side_by_side(apart)

    assert mx.allclose(whole(x), mx.concatenate(before, axis=-1), 1e-5, 1e-5).item()
    assert all(
        mx.allclose(layer(x), out, 1e-5, 1e-5).item()
        for layer, out in zip(apart, before, strict=True)
    )


def test_layers_of_many_kinds_are_left_apart() -> None:
    halves = layers(8)
    halves[0].set_dtype(mx.float16)
    modes = [
        nn.QuantizedLinear.from_linear(*layers(8), 32, 4, mode) for mode in ("affine", "mxfp4")
    ]
    for pair in (
        [*layers(8, bias=True), *layers(8)],
        [*layers(8), *layers(8, bits=4)],
        [*layers(8, bits=8), *layers(8, bits=4)],
        [*halves, *layers(8)],
        modes,
    ):
        assert list(map(id, side_by_side(pair))) == list(map(id, pair))


@pytest.mark.parametrize("kinds", [(4, 4, 6), (6, 4, 4), (4, 8, 8, None, None), (4, 6, 4)])
def test_neighbours_of_one_kind_are_one_product_between_others(
    kinds: tuple[int | None, ...],
) -> None:
    apart = [layer for bits in kinds for layer in layers(32, bits=bits)]
    x, made = mx.random.normal((3, 64)), list[Any]()
    before = mx.concatenate([layer(x) for layer in apart], axis=-1)
    mx.eval(before)

    def counted(layer: Any) -> Product:
        made.append(layer)
        return product(layer)

    out = Kernels(product=counted).joined(apart)(x)

    assert mx.allclose(out, before, 1e-5, 1e-5).item()
    assert len(made) == len(list(itertools.groupby(kinds)))


def test_weights_are_held_once_also_when_put_side_by_side_again() -> None:
    apart = layers(4096, 4096)
    (whole,) = side_by_side(apart)
    mx.clear_cache()
    once = mx.get_active_memory()

    assert side_by_side(apart)[0] is whole

    assert mx.get_active_memory() == once
    assert sum(w.nbytes for _, w in tree_flatten(apart[0].parameters())) == 4096 * 64 * 4


def test_weights_that_were_changed_are_put_side_by_side_anew() -> None:
    apart = layers(16, 16)
    side_by_side(apart)
    for layer in apart:
        layer.weight = 2 * layer.weight
    x = mx.random.normal((1, 64))

    (whole,) = side_by_side(apart)

    assert mx.allclose(whole(x), mx.concatenate([layer(x) for layer in apart], axis=-1)).item()


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_that_run_together_put_out_what_they_do_alone(bits: int | None) -> None:
    apart = layers(96, 32, bits=bits)
    inputs = [mx.random.normal((3, 64)) for _ in range(3)]
    alone = [[layer(x) for layer in apart] for x in inputs]
    mx.eval(alone)

    together = list(run_together(apart, Kernels()))

    # In either order, one of them twice, and one of them never.
    for number, index in ((0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 0), (0, 1)):
        out = together[index](inputs[number])
        assert mx.allclose(out, alone[number][index], 1e-5, 1e-5).item()


def test_layers_that_run_together_are_one_product() -> None:
    products = list[int]()

    def counted(layer: Any, **options: Any) -> Product:
        run = product(layer, **options)

        def counting(x: mx.array) -> mx.array:
            products.append(layer.weight.shape[0])
            return run(x)

        return counting

    x = mx.zeros((1, 64))

    for layer in run_together(layers(96, 32), Kernels(product=counted)):
        layer(x)

    assert products == [96 + 32]


def test_a_model_that_is_served_keeps_its_own_layers_and_shares_its_weights() -> None:
    network = tiny("llama")
    mixed_bits(network, "v_proj")
    own = [type(part) for part in network.modules()]
    weights = sum(weight.nbytes for _, weight in tree_flatten(network.parameters()))
    mx.eval(network.parameters())
    before = mx.get_active_memory()

    ragged = as_ragged(network, checks=False)

    mx.clear_cache()
    assert mx.get_active_memory() - before < weights / 10
    assert ragged.weight_bytes == weights
    assert [type(part) for part in network.modules()] == own


@pytest.mark.parametrize("wide", ["v_proj", "up_proj", "in_proj_z", "in_proj_b"])
def test_a_model_of_mixed_bits_scores_as_its_plain_forward_does(tmp_path: Path, wide: str) -> None:
    network = Loaded.at(write_qwen(tmp_path)).network
    mixed_bits(network, wide)

    assert difference(network, as_ragged(network, checks=False)) < 1e-5


def test_a_net_whose_projections_have_several_types_keeps_the_type_of_each(tmp_path: Path) -> None:
    network = Loaded.at(write_qwen(tmp_path)).network
    net = network.layers[0].linear_attn
    net.in_proj_a.set_dtype(mx.float16)

    projected = Kernels().net(net).project(mx.zeros((1, 1, 64), mx.float16))

    assert [part.dtype for part in projected] == [*[mx.float32] * 2, mx.float16, mx.float32]


@on_cpu
def test_fused_layers_decode_what_mlx_lm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded.at(write_qwen(tmp_path))
    rows = [row("a", [1, 2, 3, 4, 5], 24), row("b", list(range(40)), 24)]
    wanted = {r.row_id: loaded.greedy(r.prompt, 24) for r in rows}
    fused: list[int] = []

    def counted(layers: Sequence[Any]) -> list[Any]:
        fused.append(len(layers))
        return side_by_side(layers)

    monkeypatch.setattr(forms, "side_by_side", counted)

    model = as_ragged(loaded.network)

    # An MLP each in four layers and the head's, attention in one of them and the head's, and the
    # nets of the other three.
    assert sorted(fused) == [2] * 5 + [3] * 2 + [4] * 3
    assert run(RaggedDecoder(model, 2), rows) == wanted
