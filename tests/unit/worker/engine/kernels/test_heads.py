"""One kernel norms and rotates queries and keys and writes the tail, as MLX's operations do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from omlx_worker.engine.kernels import attention_kernel
from omlx_worker.engine.kernels.attention import Heads, Rope
from omlx_worker.engine.kernels.attention_kernel import AttentionKernel
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.pool import Pair
from omlx_worker.engine.kernels.window import TAIL, Window, own_pages
from omlx_worker.engine.models.rotary import rope_of
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import needs_compiler
from tests.helpers.rotation import turned

pytestmark = needs_compiler

ROPES: dict[str, Any] = {
    "halves": nn.RoPE(32),
    "neighbours": nn.RoPE(32, traditional=True, base=500_000.0),
    "a part of the head": nn.RoPE(8),
    "slower positions": nn.RoPE(32, scale=0.25),
    "llama3": Llama3RoPE(32, scaling_config={"factor": 8.0}),
    "yarn": YarnRoPE(32, scaling_factor=4.0, mscale=1.5),
    "longrope": SuScaledRoPE(32, long_factor=2.0, max_position_embeddings=32_768),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    monkeypatch.setattr(attention_kernel, "launch", emulator.launch)
    return AttentionKernel("metal")


def noise(seed: int, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def heads(rope: Rope, size: int = 32, **options: Any) -> Heads:
    """Of 4 queries and 2 keys."""
    return Heads(4, 2, size, rope, **options)


def given(
    heads: Heads, width: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, Heads, Pair, Window]:
    """A window of three rows: one that begins, one in mid-tail, and one at the end of its tail.

    They are rotated by other positions than those that they are written to.
    """
    offsets = mx.array([0, 40, TAIL - width], mx.int32)
    lengths = mx.array([0, 300, 4000], mx.int32)
    window = turned(Window.at(lengths + offsets, lengths, width, own_pages(3, 64)), 5)
    total = heads.queries * heads.stride + 2 * heads.keys * heads.size
    tails = [noise(seed, dtype, 3, heads.keys, TAIL, heads.size) for seed in (1, 2)]
    return noise(0, dtype, 3, width, total), heads, (tails[0], tails[1]), window


def agree(kernel: AttentionKernel, *arguments: Any, tolerance: float = 1e-3) -> None:
    (queries, tails), (wanted, tails_wanted) = (
        form.prepare(*arguments) for form in (kernel, PlainAttention())
    )
    for mine, theirs in zip((queries, *tails), (wanted, *tails_wanted), strict=True):
        assert mine.dtype == theirs.dtype
        assert mx.allclose(mine, theirs, tolerance, tolerance).item()


@pytest.mark.parametrize("name", ROPES)
def test_positions_are_rotated_as_the_familys_own_module_does(
    kernel: AttentionKernel, name: str
) -> None:
    agree(kernel, *given(heads(rope_of(ROPES[name])), 1))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("width", [1, 4])
def test_heads_are_normed_before_and_gates_between_queries_passed_over(
    kernel: AttentionKernel, width: int, dtype: mx.Dtype
) -> None:
    norms = {"query_norm": noise(5, dtype, 32), "key_norm": noise(6, dtype, 32), "epsilon": 1e-6}
    form = heads(rope_of(ROPES["a part of the head"]), gated=True, **norms)

    agree(kernel, *given(form, width, dtype), tolerance=1e-3 if dtype == mx.float32 else 2e-2)


def test_what_is_no_number_reaches_no_tail(kernel: AttentionKernel) -> None:
    projected, *rest = given(heads(rope_of(ROPES["halves"])), 1)
    projected[1, 0, -1], projected[2, 0, -2] = mx.nan, mx.inf

    _, tails = kernel.prepare(projected, *rest)

    assert all(mx.isfinite(tail).all().item() for tail in tails)


def test_positions_that_no_kernel_knows_are_refused(kernel: AttentionKernel) -> None:
    with pytest.raises(ValueError, match="does not know the positions of Identity"):
        kernel.prepare(*given(heads(rope_of(nn.Identity())), 1))
