"""Products of few rows on CUDA: what MLX's own give."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.contested import contested_product
from omlx_worker.engine.kernels.cuda.products import MOST_ROWS, multiply, takes

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA")

FEATURES, LENGTH = 192, 320


def case(rows: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, LENGTH), key=mx.random.key(rows)).astype(mx.bfloat16)
    return x, mx.random.normal((FEATURES, LENGTH), key=mx.random.key(1)).astype(mx.bfloat16)


def close(got: mx.array, wanted: mx.array) -> bool:
    return mx.allclose(got.astype(mx.float32), wanted.astype(mx.float32), 2e-2, 0.2).item()


@on_cuda
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16])
def test_a_product_is_that_of_mlx(rows: int) -> None:
    x, weight = case(rows)
    added = mx.random.normal((rows, FEATURES)).astype(mx.bfloat16)

    assert close(multiply(weight, x), x @ weight.T)
    assert close(multiply(weight, x, added), x @ weight.T + added)


@on_cuda
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_gated_product_is_that_of_an_mlp(rows: int) -> None:
    x, weight = case(rows)
    gate, up = mx.split(x @ weight.T, 2, axis=-1)

    assert close(multiply(weight, x, gated=True), nn.silu(gate) * up)


def test_layers_that_it_does_not_take_are_left_to_mlx() -> None:
    layer = nn.Linear(LENGTH, FEATURES, bias=False)
    _, layer.weight = case(4)

    assert takes(layer)
    assert not takes(nn.QuantizedLinear.from_linear(layer))
    layer.bias = mx.zeros(FEATURES)
    assert not takes(layer)
    assert not takes(nn.Linear(LENGTH, FEATURES, bias=False))


def test_inputs_that_it_does_not_take_are_left_to_mlx() -> None:
    layer = nn.Linear(LENGTH, FEATURES, bias=False)
    x, layer.weight = case(4)
    many = mx.repeat(x, MOST_ROWS, axis=0)
    contest = Contest()
    product = contested_product(layer, contest)

    assert mx.array_equal(product(many), layer(many)).item()
    wide = x.astype(mx.float32)
    assert mx.array_equal(product(wide), layer(wide)).item()
    assert not contest.results
