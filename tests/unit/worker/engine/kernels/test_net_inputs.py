"""The kernels around the delta rule compute what the layers' operations do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from omlx_worker.engine.kernels import net_kernels
from omlx_worker.engine.kernels.net_kernels import NetKernels
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations
from omlx_worker.engine.kernels.source import Platform, launch
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import needs_compiler

SLOTS = 3


@pytest.fixture(
    params=[
        pytest.param("metal", marks=needs_compiler),
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA")
        ),
    ]
)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Platform:
    on_metal = request.param == "metal"
    monkeypatch.setattr(net_kernels, "launch", emulator.launch if on_metal else launch)
    platform: Platform = request.param
    return platform


def net_of(dtype: mx.Dtype) -> Any:
    """A gated delta net with heads of the sizes that published models have."""
    mx.random.seed(0)
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    net = GatedDeltaNet(TextModelArgs(hidden_size=64, **sizes))
    net.set_dtype(dtype)
    return net


def noise(seed: int, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("width", "depth", "prompt"),
    [(1, 0, False), (4, 0, False), (1, 3, False), (3, 2, False), (7, 0, True)],
)
def test_the_kernels_compute_what_the_operations_do(
    platform: Platform, width: int, depth: int, prompt: bool, dtype: mx.Dtype
) -> None:
    net = net_of(dtype)
    total = net.conv_dim + net.value_dim + 2 * net.num_v_heads
    projected = (noise(0, dtype, SLOTS, width, total),)
    conv = noise(7, dtype, SLOTS, net.conv_kernel_size - 1, net.conv_dim)
    past = noise(8, dtype, SLOTS, 1 + depth, total) if depth else None
    accepted = mx.array([min(depth, slot) for slot in range(SLOTS)], mx.int32)
    given = projected, conv, past, None if prompt else accepted

    (got, conv_out), (wanted, conv_wanted) = (
        form.prepare(*given) for form in (NetKernels(net, platform), NetOperations(net))
    )
    mixed = NetKernels(net, platform).gated(wanted.values, projected)

    tolerance = 1e-4 if dtype == mx.float32 else 2e-2
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert mx.allclose(mine, theirs, tolerance, tolerance).item()
    assert mx.array_equal(conv_out, conv_wanted).item()
    plain = NetOperations(net).gated(wanted.values, projected)
    assert mx.allclose(mixed, plain, tolerance, tolerance).item()
