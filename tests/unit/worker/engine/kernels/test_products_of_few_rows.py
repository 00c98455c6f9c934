"""Products of few rows with packed weights on Metal: exact, and the same in any company."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu

from omlx_worker.engine.caches.layout import pages_for
from omlx_worker.engine.kernels import contested, trial
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.contested import contested_product
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.metal import products
from omlx_worker.engine.kernels.metal.products import is_for, multiply, takes
from omlx_worker.engine.kernels.plain.products import packed_product
from omlx_worker.engine.kernels.window import TAIL, Window, own_pages
from omlx_worker.engine.loading.self_check import difference
from omlx_worker.engine.models.ragged_model import RaggedModel
from tests.helpers.families import tiny
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import needs_compiler

ROUNDING = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
"""Of a number rounded once, as a share of the largest of its row."""

PACKINGS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]

LENGTHS = {
    "Qwen3.5 4B": (2560, 4096, 9216),
    "Qwen3.5 9B": (4096, 12_288),
    "Qwen3.5 27B": (5120, 6144, 17_408),
    "Qwen3.5 35B-A3B": (512, 2048, 4096),
    "Gemma 4 31B": (5376, 8192, 21_504),
    "gpt-oss": (2880, 4096),
}
"""Of the inputs of a model's products."""


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate Metal."""
    monkeypatch.setattr(products, "launch", emulator.launch)


def case(
    length: int, features: int, bits: int = 4, group: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> tuple[Any, mx.array]:
    """A layer and 33 rows of different sizes."""
    layer = nn.Linear(length, features, bias=False)
    layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(features)).astype(dtype)
    x = mx.random.normal((33, length), key=mx.random.key(length))
    x *= mx.exp(mx.linspace(-3, 3, 33))[:, None]
    return layer.to_quantized(group, bits), x.astype(dtype)


def by_kernel(
    layer: Any, x: mx.array, added: mx.array | None = None, *, gated: bool = False
) -> mx.array:
    weights = layer.weight, layer.scales, layer.biases
    packing = {"bits": layer.bits, "group_size": layer.group_size}
    return multiply(x, weights, added, gated=gated, **packing)


def exact(layer: Any, x: mx.array) -> np.ndarray:
    """The product in float64."""
    shifts = np.arange(0, 32, layer.bits, dtype=np.uint32)
    packed = np.array(layer.weight)[..., None] >> shifts & (1 << layer.bits) - 1
    scales, biases = (np.repeat(wide(p), layer.group_size, 1) for p in (layer.scales, layer.biases))
    weight: np.ndarray = packed.reshape(len(packed), -1) * scales + biases
    made: np.ndarray = wide(x) @ weight.T
    return made


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def assert_exact(got: mx.array, wanted: np.ndarray) -> None:
    apart = np.abs(wide(got) - wanted) / np.abs(wanted).max(1, keepdims=True)
    assert apart.max() < ROUNDING[got.dtype]


@needs_compiler
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        (4, 64, mx.bfloat16),
        (8, 32, mx.float32),
        *(
            pytest.param(*packing, dtype, marks=pytest.mark.slow)
            for packing in PACKINGS
            for dtype in ROUNDING
        ),
    ],
)
def test_a_row_is_exact_and_the_same_among_any_number(
    bits: int, group: int, dtype: mx.Dtype
) -> None:
    layer, x = case(384, 40, bits, group, dtype)

    all_rows = by_kernel(layer, x)

    assert_exact(all_rows, exact(layer, x))
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 24, 25):
        assert mx.array_equal(by_kernel(layer, x[:count]), all_rows[:count]).item()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
@pytest.mark.parametrize("length", sorted({n for each in LENGTHS.values() for n in each}))
def test_rows_are_exact_at_the_lengths_of_published_models(
    length: int, bits: int, group: int
) -> None:
    if length % group:
        pytest.skip("no whole groups")
    layer, x = case(length, 24, bits, group)
    whole = length % (512 // bits) == 0
    assert takes(layer) == whole
    product = contested_product(layer, Contest(fixed=True))
    wanted = exact(layer, x)

    if whole:
        all_rows = by_kernel(layer, x[:24])
        assert_exact(all_rows, wanted[:24])
        for count in range(1 + PACKINGS.index((bits, group)), 24, len(PACKINGS)):
            assert mx.array_equal(by_kernel(layer, x[:count]), all_rows[:count]).item()
    for count in (25, 33):
        assert mx.array_equal(product(x[:count]), layer(x[:count])).item()


@needs_compiler
def test_a_row_is_the_same_in_any_place_beside_any_numbers_and_in_another_block() -> None:
    layer, x = case(256, 200)
    x = x[:16]
    rows = by_kernel(layer, x)
    is_other = mx.arange(16)[:, None] % 3 == 1

    turned = by_kernel(layer, mx.concatenate([x[::-1], x[:5], x]))
    beside_nan = by_kernel(layer, mx.where(is_other, mx.array(float("nan"), x.dtype), x))

    assert mx.array_equal(turned[:16], rows[::-1]).item()
    assert mx.array_equal(turned[16:], mx.concatenate([rows[:5], rows])).item()
    kept = mx.where(is_other, 0, beside_nan)
    assert mx.array_equal(kept, mx.where(is_other, 0, rows)).item()


@needs_compiler
@pytest.mark.parametrize(
    ("features", "bits"),
    [
        (200, 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(200, 8), (4096, 4), (4096, 8)]),
    ],
)
def test_weights_are_read_once_for_up_to_24_rows(features: int, bits: int) -> None:
    layer, x = case(256, features, bits)
    # A block's last features are a whole tile, which reads the last feature in place of none.
    per_block = 8 * products.tiles(features)
    once = -(-features // per_block) * per_block * layer.weight.shape[1] * 4

    for count, times in ((1, 1), (8, 1), (9, 1), (24, 1), (25, 2)):
        by_kernel(layer, x[:count])
        assert emulator.BYTES_READ["weight"] == times * once


@needs_compiler
@pytest.mark.parametrize("features", [64, pytest.param(4104, marks=pytest.mark.slow)])
def test_what_comes_after_a_product_is_that_of_mlx(features: int) -> None:
    layer, x = case(256, features, dtype=mx.float32)
    x = x[:11]
    out = by_kernel(layer, x)
    gated = swiglu(*mx.split(out, 2, axis=-1))

    assert mx.array_equal(by_kernel(layer, x, out), out + out).item()
    assert mx.allclose(by_kernel(layer, x, gated=True), gated, 1e-5, 1e-4).item()
    assert mx.allclose(by_kernel(layer, x, gated, gated=True), gated + gated, 1e-5, 1e-4).item()


def test_layers_that_it_does_not_take_are_left_to_mlx() -> None:
    layer, _ = case(256, 64)

    assert takes(layer)
    assert takes(nn.Embedding(64, 256).to_quantized(64, 8))
    assert not takes(nn.Linear(256, 64, bias=False))
    assert not takes(nn.Linear(256, 64, bias=False).to_quantized(32, 4, "mxfp4"))
    assert not takes(nn.Linear(192, 64, bias=False).to_quantized(64, 4))
    assert not takes(nn.Linear(256, 64, bias=False).to_quantized(64, 6))


@pytest.mark.parametrize("generation", range(13, 17))
def test_the_kernel_is_for_m1_to_m4(generation: int) -> None:
    assert is_for(f"applegpu_g{generation}s")


@pytest.mark.parametrize(
    "architecture", ["applegpu_g17s", "applegpu_g12p", "applegpu_g16", "sm_90", "None", ""]
)
def test_the_kernel_is_for_no_other_gpu(architecture: str) -> None:
    assert not is_for(architecture)


@needs_compiler
@pytest.mark.parametrize("fixed", [False, True])
def test_few_rows_have_a_contest_and_others_have_none(
    fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CACHED", 1 << 12), ("CHAIN", 2), ("LAPS", 1)):
        monkeypatch.setattr(trial, name, value)
    layer, x = case(256, 64, dtype=mx.float32)
    contest = Contest(fixed=fixed)
    product = contested_product(layer, contest)

    few = [4, 16, 24]
    for count in (*few, 25, 33):
        assert mx.allclose(product(x[:count]), layer(x[:count]), 1e-4, 1e-3).item()

    kind = "256 to 64, 4 bits in groups of 64, float32"
    decided = [result.size for result in contest.results]
    assert decided == [f"{count} rows, {kind}" for count in ([16] if fixed else few)]
    assert not any(result.faults for result in contest.results)
    if fixed:
        assert mx.array_equal(product(x[:5]), by_kernel(layer, x)[:5]).item()
        assert {result.form for result in contest.results} == {"kernel"}


def test_a_contest_while_a_step_is_traced_holds_no_more_weights_than_it_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def kernel(x: mx.array, weights: Any, *given: Any, **packing: Any) -> mx.array:
        sizes.append(weights[0].shape[0])
        return packed_product(x, weights, *given, **packing)

    monkeypatch.setattr(contested, "multiply", kernel)
    monkeypatch.setattr(contested, "MOST_SAMPLED", 256 * 33 // 2)
    layer, x = case(256, 64, dtype=mx.float32)
    product = contested_product(layer, Contest(fixed=True), gated=True)

    got = mx.compile(product)(x[:8], mx.ones((8, 32)))

    assert sizes == [32, 64]
    assert mx.allclose(got, swiglu(*mx.split(layer(x[:8]), 2, axis=-1)) + 1, 1e-4, 1e-3).item()


@needs_compiler
def test_layers_side_by_side_and_a_vocabulary_are_one_product() -> None:
    contest = Contest(fixed=True)
    kernels = Kernels(product=partial(contested_product, contest=contest))
    (gate, x), (up, _) = case(256, 64, dtype=mx.float32), case(256, 64, dtype=mx.float32)
    x = x[:16]
    words = nn.Embedding(96, 256).to_quantized(64, 8)
    wanted = swiglu(gate(x), up(x)), mx.concatenate([gate(x), up(x)], axis=-1), words.as_linear(x)

    opened = kernels.fuse([gate, up], gated=True)
    assert opened is not None
    got = opened(x), kernels.joined([gate, up])(x), kernels.product(words)(x)

    for mine, other in zip(got, wanted, strict=True):
        assert mx.allclose(mine, other, 1e-4, 1e-4).item()
    assert [result.form for result in contest.results] == ["kernel"] * 3


@needs_compiler
def test_a_bias_comes_after_the_product() -> None:
    layer, x = case(256, 64, dtype=mx.float32)
    layer.bias = mx.random.normal((64,))
    contest = Contest(fixed=True)
    plain, gated = (contested_product(layer, contest, gated=gated) for gated in (False, True))
    wanted = layer(x[:8])
    opened = swiglu(*mx.split(wanted, 2, axis=-1))

    assert mx.allclose(plain(x[:8]), wanted, 1e-4, 1e-4).item()
    assert mx.allclose(plain(x[:8], wanted), wanted + wanted, 1e-4, 1e-4).item()
    assert mx.allclose(gated(x[:8], opened), opened + opened, 1e-4, 1e-4).item()
    assert {result.form for result in contest.results} == {"kernel"}


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_all_products_of_a_family_are_the_kernels(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its experts, and lengths that are no multiple of 64."""
    network = tiny(family)
    nn.quantize(
        network,
        group_size=32,
        bits=8,
        class_predicate=lambda _, part: (
            isinstance(part, nn.Linear | nn.Embedding) and part.weight.shape[1] % 64 == 0
        ),
    )
    contest = Contest(fixed=True)
    ragged = RaggedModel(network, Kernels(product=partial(contested_product, contest=contest)))

    assert difference(network, ragged) < 1e-4
    assert {result.form for result in contest.results} == {"kernel"}

    monkeypatch.delattr(mx, "quantized_matmul")
    none = mx.zeros((1,), mx.int32)
    window = Window.at(none, none, 8, own_pages(1, pages_for(TAIL)))
    tokens, caches = mx.zeros((1, 8), mx.int32), ragged.new_caches(1, TAIL)
    mx.eval(ragged.logits(ragged.forward(tokens, caches, window, none)))
