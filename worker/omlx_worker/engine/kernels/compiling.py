"""Whether `mx.compile` compiles, and work without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

VARIABLE = "MLX_DISABLE_COMPILE"
"""MLX reads it: `mx.compile` compiles nothing if it is set."""


def compiles() -> bool:
    """Whether `mx.compile` compiles: not on a CPU without g++, nor when it is turned off.

    MLX does not say. A function that is compiled runs only once for two calls of one shape.
    """
    runs = 0

    def count(array: mx.array) -> mx.array:
        nonlocal runs
        runs += 1
        return array

    probe, array = mx.compile(count), mx.zeros(1)
    probe(array)
    probe(array)
    return runs == 1


@contextmanager
def unfused() -> Iterator[None]:
    """Turn `mx.compile` off inside of the block.

    For work that gains nothing from it: MLX builds every fused kernel that it has not kept, on a
    CPU with the C++ compiler, one after another.
    """
    if not compiles():
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
