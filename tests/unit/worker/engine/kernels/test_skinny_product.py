"""Products of few rows on CUDA: what MLX's own give."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_worker.engine.kernels import platform, skinny_product

pytestmark = pytest.mark.skipif(platform.backend() != "cuda", reason="no CUDA")

FEATURES, LENGTH = 192, 320


def case(rows: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, LENGTH), key=mx.random.key(rows)).astype(mx.bfloat16)
    return x, mx.random.normal((FEATURES, LENGTH), key=mx.random.key(1)).astype(mx.bfloat16)


def close(got: mx.array, wanted: mx.array) -> bool:
    return mx.allclose(got.astype(mx.float32), wanted.astype(mx.float32), 2e-2, 0.2).item()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 24, 31, 32])
def test_a_product_is_that_of_mlx(rows: int) -> None:
    x, weight = case(rows)
    added = mx.random.normal((rows, FEATURES)).astype(mx.bfloat16)

    assert close(skinny_product.product(weight, x), x @ weight.T)
    assert close(skinny_product.product(weight, x, added), x @ weight.T + added)


@pytest.mark.parametrize("rows", [1, 5, 16, 32])
def test_a_gated_product_is_that_of_an_mlp(rows: int) -> None:
    x, weight = case(rows)
    gate, up = mx.split(x @ weight.T, 2, axis=-1)

    assert close(skinny_product.product(weight, x, gated=True), nn.silu(gate) * up)


def test_what_it_does_not_take_is_left_to_mlx() -> None:
    layer = nn.Linear(LENGTH, FEATURES, bias=False)
    x, layer.weight = case(4)

    assert skinny_product.takes(layer, x)
    assert not skinny_product.takes(layer, mx.repeat(x, 9, axis=0))
    assert not skinny_product.takes(layer, x.astype(mx.float32))
    assert not skinny_product.takes(nn.QuantizedLinear.from_linear(layer), x)
