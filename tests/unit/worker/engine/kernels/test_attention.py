"""The attention kernels compute what MLX's operations do, for every form of layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.kernels import attention_kernel
from omlx_worker.engine.kernels.attention import Attention
from omlx_worker.engine.kernels.attention_kernel import AttentionKernel, lanes_for
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.plain.fixed_attention import FixedAttention
from omlx_worker.engine.kernels.pool import Pair, Pool
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window
from tests.helpers.metal import emulator
from tests.helpers.metal.emulator import needs_compiler

HEADS = 2


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    """The kernels, run by the emulator; the parameter is the tile."""
    monkeypatch.setattr(attention_kernel, "launch", emulator.launch)
    return AttentionKernel("metal", request.param)


def noise(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def shuffled(slots: int, capacity: int) -> mx.array:
    """A table of pages that lie anywhere."""
    pages = mx.random.permutation(slots * capacity // PAGE, key=mx.random.key(0))
    return pages.astype(mx.int32).reshape(slots, -1)


def attended(
    attention: Attention,
    rows: Sequence[tuple[int, int]],
    capacities: Sequence[int] = (512,),
    *,
    width: int = 1,
    group: int = 2,
    size: int = 16,
    ring: int = 0,
    **options: Any,
) -> mx.array:
    """What a window sees.

    Args:
        rows: body length and tail positions of each slot, shared out evenly to the bodies.
        capacities: of the bodies.
    """
    slots = len(rows)
    lengths = mx.array([length for length, _ in rows], mx.int32)
    cursors = lengths + mx.array([filled for _, filled in rows], mx.int32)
    capacity = max(capacities)
    table = shuffled(slots, capacity)
    window = Window.at(cursors, lengths, width, table)
    tails: Pair = noise(1, slots, HEADS, TAIL, size), noise(2, slots, HEADS, TAIL, size)
    shape = (slots, HEADS, min(capacity, ring), size) if ring else (table.size, HEADS, PAGE, size)
    pool = Pool([noise(10, *shape), noise(20, *shape)], ring)
    new = [noise(seed, slots, HEADS, width, size) for seed in (3, 4)]
    queries = noise(5, slots, HEADS * group, width, size)
    tails = attention.put(tails, *new, window)
    return attention.attend(queries, pool, tails, window, size**-0.5, **options)


CASES: dict[str, dict[str, Any]] = {
    "one token, nothing before it": {"rows": [(0, 0)]},
    "rows of different lengths": {"rows": [(300, 5), (0, 3), (64, 0), (512, 100)]},
    "a window of four": {"rows": [(300, 5), (0, 3)], "width": 4},
    "many queries of a key head": {"rows": [(70, 2)], "width": 9, "group": 8},
    "each query head its own key head": {"rows": [(30, 2)], "group": 1},
    "bodies of two capacities": {"rows": [(30, 2), (600, 7)], "capacities": (256, 1024)},
    "positions shared by several blocks": {"rows": [(1900, 7), (3, 1)], "capacities": (2048,)},
    "a sliding window": {"rows": [(300, 5), (2, 1)], "sliding": 40, "width": 3},
    "a ring that is full": {"rows": [(300, 5), (20, 1)], "sliding": 64, "ring": 64, "width": 3},
    "a window within the tail": {"rows": [(300, 50)], "sliding": 20, "ring": 20},
    "sinks": {"rows": [(300, 5), (1, 0)], "sinks": noise(9, 4), "width": 2},
    "sinks and several blocks": {
        "rows": [(1900, 7)],
        "capacities": (2048,),
        "sinks": noise(9, 4),
    },
    "a limit of scores": {"rows": [(300, 5)], "softcap": 0.5},
    "heads of 48": {"rows": [(100, 5)], "size": 48},
    "heads of 80": {"rows": [(100, 5)], "size": 80},
    "heads of 512": {"rows": [(40, 5)], "size": 512},
}


QUICK = {"a ring that is full", "sinks and several blocks"}


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(
            tile,
            case,
            id=f"{name}, {tile} queries of a warp",
            marks=[] if name in QUICK and tile == 2 else pytest.mark.slow,
        )
        for name, case in CASES.items()
        for tile in ((2, 4) if name in QUICK else (2,))
    ],
    indirect=["kernel"],
)
def test_the_kernels_see_what_the_operations_see(
    case: dict[str, Any], kernel: AttentionKernel
) -> None:
    wanted = attended(PlainAttention(), **case)

    got = attended(kernel, **case)

    assert got.shape == wanted.shape
    assert np.allclose(np.array(got), np.array(wanted), 1e-4, 2e-5)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "capacities" not in case])
def test_blocks_of_positions_see_what_whole_bodies_see(case: str) -> None:
    wanted = attended(PlainAttention(), **CASES[case])

    got = attended(FixedAttention(), **CASES[case])

    assert np.allclose(np.array(got), np.array(wanted), 1e-4, 2e-5)


def test_blocks_of_positions_see_latents() -> None:
    rotary = noise(8, 2, 2 * HEADS, 3, 16)
    given: dict[str, Any] = {"rows": [(300, 5), (0, 3)], "width": 3, "rotary": rotary}

    got, wanted = (attended(each, **given) for each in (FixedAttention(), PlainAttention()))

    assert np.allclose(np.array(got), np.array(wanted), 1e-4, 2e-5)


CURSOR, WIDE, SIZE = 300, 2, 16


def of_one_history(
    attention: Attention, length: int, capacity: int, *, ring: int = 0, **options: Any
) -> list[float]:
    """What one window of one row sees beside a row of noise.

    Args:
        length: positions of it in the body; the others are in the tail.
    """
    history = [np.array(noise(seed, HEADS, CURSOR + WIDE, SIZE)) for seed in (1, 2)]
    shape = 2, HEADS, min(capacity, ring or capacity), SIZE
    bodies = [np.array(noise(capacity + seed, *shape)) for seed in (3, 4)]
    tails = [np.array(noise(length + seed, 2, HEADS, TAIL, SIZE)) for seed in (5, 6)]
    for body, tail, told in zip(bodies, tails, history, strict=True):
        for position in range(max(0, length - ring) if ring else 0, length):
            body[0, :, position % ring if ring else position] = told[:, position]
        tail[0, :, : CURSOR + WIDE - length] = told[:, length:]
    lengths, cursors = mx.array([length, 7]), mx.array([CURSOR, 9])
    table = shuffled(2, capacity)
    window = Window.at(cursors, lengths, WIDE, table)
    if not ring:
        order = np.argsort(np.array(table).reshape(-1))
        bodies = [
            body.reshape(2, HEADS, -1, PAGE, SIZE)
            .swapaxes(1, 2)
            .reshape(-1, HEADS, PAGE, SIZE)[order]
            for body in bodies
        ]
    queries = mx.array(np.stack([np.array(noise(n, 2 * HEADS, WIDE, SIZE)) for n in (7, length)]))
    pool = Pool([mx.array(part) for part in bodies], ring)
    held: Pair = mx.array(tails[0]), mx.array(tails[1])
    seen = attention.attend(queries, pool, held, window, 0.25, **options)
    numbers: list[float] = seen[0].flatten().tolist()
    return numbers


def of_one_history_everywhere(attention: Attention, **options: Any) -> list[list[float]]:
    return [
        of_one_history(attention, length, capacity, **options)
        for length, capacity in ((300, 512), (180, 512), (260, 1024), (299, 2048))
    ]


CUT = pytest.mark.parametrize("options", [{}, {"sliding": 64, "ring": 64}], ids=["all", "a ring"])


@CUT
def test_blocks_see_the_same_to_the_last_bit_wherever_a_body_ends(options: dict[str, Any]) -> None:
    first, *others = of_one_history_everywhere(FixedAttention(), **options)
    assert all(other == first for other in others)

    first, *others = of_one_history_everywhere(PlainAttention(), **options)
    assert any(other != first for other in others)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [2], indirect=True)
@CUT
def test_a_fixed_kernel_sees_the_same_to_the_last_bit_wherever_a_body_ends(
    options: dict[str, Any], kernel: AttentionKernel
) -> None:
    first, *others = of_one_history_everywhere(replace(kernel, fixed=True), **options)
    assert all(other == first for other in others)

    first, *others = of_one_history_everywhere(kernel, **options)
    assert options or any(other != first for other in others), "bodies are shared out alike"


def test_what_the_kernels_do_not_take_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="key heads of 18 and value heads of 18"):
        attended(AttentionKernel("cuda"), [(100, 5)], size=18)
    latents = {"rotary": noise(1, 1, 2 * HEADS, 1, 16)}
    with pytest.raises(ValueError, match="latents"):
        AttentionKernel("cuda").attend(
            *(
                noise(1, 1, 2, 1, 16),
                Pool([noise(2, 1, 2, PAGE, 16)] * 2),
                (noise(2, 1, 2, TAIL, 16),) * 2,
            ),
            *(Window.at(mx.array([3]), mx.array([0]), 1, shuffled(1, 256)), 1.0),
            **latents,
        )


def test_heads_have_as_many_lanes_as_hold_few_numbers_each() -> None:
    assert [lanes_for(size) for size in (64, 80, 128, 256, 512)] == [4, 4, 8, 16, 32]
    assert lanes_for(18) is None
