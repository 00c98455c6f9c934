"""Sources of kernels: the macros of each platform, compilation and launch.

A body is written for one lane of a group that works on one vector. Macros hide what differs
between CUDA and Metal, so a body is the same on both, and in the tests, where an emulator runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import mlx.core as mx

Platform = Literal["cuda", "metal"]

HEADER = """
template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };
"""

IN_A_NAME = str.maketrans({".": "_", "+": "p", "-": "m"})
"""For numbers that are part of a kernel's name."""

_PROLOGUES = {
    "cuda": """
  const int lane = threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.z;
  #define ACROSS(x, offset) __shfl_xor_sync(0xffffffffu, x, offset)
  #define FOUR(T, p) (*reinterpret_cast<const Four<T>*>(p))
  #define PUT_FOUR(T, p) (*reinterpret_cast<Four<T>*>(p))
  #define READONLY const
  #define EXP(x) __expf(x)
  #define EXACT_EXP(x) expf(x)
  #define LOG1P(x) log1pf(x)
  #define RSQRT(x) rsqrtf(x)
  #define COS(x) cosf(x)
  #define SIN(x) sinf(x)
  #define ROWS (gridDim.y * blockDim.y)
  #define SHARED __shared__
  #define BARRIER __syncthreads()
""",
    # Metal has no log1p; this one is MLX's own, which it puts before every kernel.
    "metal": """
  const int lane = thread_position_in_threadgroup.x;
  const int row = thread_position_in_grid.y;
  const int n = thread_position_in_grid.z;
  #define ACROSS(x, offset) simd_shuffle_xor(x, offset)
  #define FOUR(T, p) (*reinterpret_cast<const device Four<T>*>(p))
  #define PUT_FOUR(T, p) (*reinterpret_cast<device Four<T>*>(p))
  #define READONLY const device
  #define EXP(x) fast::exp(x)
  #define EXACT_EXP(x) precise::exp(x)
  #define LOG1P(x) log1p(x)
  #define RSQRT(x) precise::rsqrt(x)
  #define COS(x) precise::cos(x)
  #define SIN(x) precise::sin(x)
  #define ROWS threads_per_grid.y
  #define SHARED threadgroup
  #define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
""",
}


@cache
def source(platform: Platform, body: str) -> str:
    """A body behind a platform's macros."""
    return _PROLOGUES[platform] + body


def launch(
    platform: Platform,
    name: str,
    source: str,
    inputs: Mapping[str, mx.array],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    template: Mapping[str, Any],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    header: str = HEADER,
) -> list[mx.array]:
    """Run a kernel; MLX compiles it when it first runs with new template arguments.

    Args:
        name: MLX caches compiled kernels by it.
        outputs: their shapes and types.
    """
    kernel = _kernel(platform, name, tuple(inputs), tuple(outputs), source, header)
    made: list[mx.array] = kernel(
        inputs=list(inputs.values()),
        template=list(template.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    return made


@cache
def _kernel(
    platform: Platform,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    header: str,
) -> Any:
    make: Any = mx.fast.cuda_kernel if platform == "cuda" else mx.fast.metal_kernel
    return make(name, list(inputs), list(outputs), source, header)
