"""The kernels around the delta rule compute what the layers' operations do."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from omlx_worker.engine.kernels.cuda import net_inputs
from omlx_worker.engine.kernels.delta_rule import Inputs
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations, Projected
from omlx_worker.engine.kernels.plain.products import product
from tests.helpers.decoding import Loaded
from tests.unit.worker.engine.kernels import emulator
from tests.unit.worker.engine.kernels.emulator import needs_compiler

SLOTS = 3

LANES = 8
"""Fewer than on a GPU, for the heads of the tiny model."""

OUTPUTS = ("queries", "keys", "values", "decay", "beta", "conv_out")

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="no CUDA")


@pytest.fixture
def net(qwen: Loaded) -> Any:
    """A gated delta net of a tiny model."""
    return qwen.network.layers[0].linear_attn


def projections(net: Any, width: int, seed: int = 0) -> mx.array:
    total = net.conv_dim + net.value_dim + 2 * net.num_v_heads
    return mx.random.normal((SLOTS, width, total), key=mx.random.key(seed))


def case(net: Any, width: int, depth: int) -> tuple[mx.array, mx.array, mx.array | None, mx.array]:
    """Projections, committed conv inputs, the last window's projections, and drafts accepted."""
    conv = mx.random.normal((SLOTS, net.conv_kernel_size - 1, net.conv_dim), key=mx.random.key(7))
    past = projections(net, 1 + depth, seed=8) if depth else None
    accepted = mx.array([min(depth, slot) for slot in range(SLOTS)], mx.int32)
    return projections(net, width), conv, past, accepted


def apart(net: Any, projected: mx.array) -> Projected:
    """The kernels' projections as the operations take them."""
    heads = net.num_v_heads
    sizes = [net.conv_dim, net.value_dim, heads]
    raw, gate, b, a = mx.split(projected, list(accumulate(sizes)), axis=-1)
    return raw, gate.reshape(*gate.shape[:2], heads, net.head_v_dim), a, b


def by_operations(
    net: Any,
    projected: mx.array,
    conv: mx.array,
    past: mx.array | None,
    accepted: mx.array | None,
) -> tuple[Inputs, mx.array]:
    """What the kernel is to compute."""
    plain = NetOperations(net)
    past = None if past is None else past[..., : net.conv_dim]
    return plain.prepare(apart(net, projected), conv, past, accepted)


def constants(net: Any, projected: mx.array, *, commit_first: bool) -> dict[str, int]:
    total = projected.shape[-1]
    return {
        "Lanes": LANES,
        "Dk": net.head_k_dim,
        "Dv": net.head_v_dim,
        "Hk": net.num_k_heads,
        "H": net.num_v_heads,
        "Taps": net.conv_kernel_size - 1,
        "Channels": net.conv_dim,
        "Projected": total,
        "B": total - 2 * net.num_v_heads,
        "A": total - net.num_v_heads,
        "CommitFirst": commit_first,
    }


@needs_compiler
@pytest.mark.parametrize(
    ("width", "depth", "prompt"),
    [(1, 0, False), (4, 0, False), (1, 3, False), (3, 2, False), (1, 0, True), (7, 0, True)],
)
def test_a_lane_convolves_normalises_and_gates_as_the_operations_do(
    net: Any, width: int, depth: int, prompt: bool, tmp_path: Path
) -> None:
    projected, conv, past, accepted = case(net, width, depth)
    given = {
        "projected": projected,
        "conv": conv,
        "kernel": net.conv1d.weight,
        "A_log": net.A_log,
        "dt_bias": net.dt_bias,
    }
    if past is not None:
        given |= {"past": past, "accepted": accepted}
    wanted, conv_wanted = by_operations(net, projected, conv, past, None if prompt else accepted)

    *got, conv_out = emulator.run(
        net_inputs.body(replays=past is not None),
        given,
        dict(zip(OUTPUTS, [*(part.shape for part in wanted), conv.shape], strict=True)),
        constants(net, projected, commit_first=not prompt),
        grid=(LANES, net_inputs._padded(2 * net.num_k_heads + net.num_v_heads), SLOTS * width),
        block_rows=net_inputs.ROWS,
        folder=tmp_path,
    )

    for mine, theirs in zip(got, wanted, strict=True):
        assert np.allclose(mine, np.array(theirs), 1e-4, 1e-5)
    assert np.array_equal(conv_out, np.array(conv_wanted))


@needs_compiler
def test_a_lane_norms_and_gates_what_was_read_as_the_operations_do(
    net: Any, tmp_path: Path
) -> None:
    width, heads, dv = 2, net.num_v_heads, net.head_v_dim
    projected = projections(net, width)
    outputs = mx.random.normal((SLOTS, width, heads, dv), key=mx.random.key(3))

    (mixed,) = emulator.run(
        net_inputs.gated_norm_body(net.norm.eps),
        {
            "outputs": outputs,
            "projected": projected,
            "weight": net.norm.weight,
        },
        {"mixed": (SLOTS, width, heads * dv)},
        {
            "H": heads,
            "Dv": dv,
            "Projected": projected.shape[-1],
            "Gate": net.conv_dim,
            "Lanes": LANES,
        },
        grid=(LANES, net_inputs._padded(heads), SLOTS * width),
        block_rows=net_inputs.ROWS,
        folder=tmp_path,
    )

    wanted = NetOperations(net).gated(outputs, apart(net, projected))
    assert np.allclose(mixed, np.array(wanted), 1e-4, 1e-5)


@on_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("width", "depth"), [(1, 0), (4, 0), (1, 3), (3, 2)])
def test_the_kernels_compute_what_the_operations_do(
    width: int, depth: int, dtype: mx.Dtype
) -> None:
    net = wide_net(dtype)
    projected, conv, past, accepted = (
        None if part is None else part if part.dtype == mx.int32 else part.astype(dtype)
        for part in case(net, width, depth)
    )
    assert projected is not None
    assert conv is not None
    assert accepted is not None

    kernels = net_inputs.NetKernels(net, product(nn.Identity()))
    got, conv_out = kernels.prepare((projected,), conv, past, accepted)
    mixed = kernels.gated(got.values, (projected,))

    wanted, conv_wanted = by_operations(net, projected, conv, past, accepted)
    tolerance = 1e-4 if dtype == mx.float32 else 2e-2
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert mx.allclose(mine, theirs, tolerance, tolerance).item()
    assert mx.array_equal(conv_out, conv_wanted).item()
    plain = NetOperations(net).gated(wanted.values, apart(net, projected))
    assert mx.allclose(mixed, plain, tolerance, tolerance).item()


def wide_net(dtype: mx.Dtype) -> Any:
    """A gated delta net with heads of the sizes that published models have."""
    from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

    mx.random.seed(0)
    args = TextModelArgs(
        hidden_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    net = GatedDeltaNet(args)
    net.set_dtype(dtype)
    return net
