"""Where the kernels of this package run, and the words they share.

Their bodies are written for one lane of a group that works on one vector. What differs between
CUDA and Metal is named by macros, so that a body is the same everywhere, also in the tests,
where one lane has a vector to itself.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal

import mlx.core as mx

Backend = Literal["cuda", "metal"]

HEADER = """
template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };
"""

_PROLOGUES = {
    "cuda": """
  const int lane = threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.z;
  #define ACROSS(x, offset) __shfl_xor_sync(0xffffffffu, x, offset)
  #define FOUR(T, p) (*reinterpret_cast<const Four<T>*>(p))
  #define PUT_FOUR(T, p) (*reinterpret_cast<Four<T>*>(p))
  #define READONLY const
""",
    "metal": """
  const int lane = thread_position_in_threadgroup.x;
  const int row = thread_position_in_grid.y;
  const int n = thread_position_in_grid.z;
  #define ACROSS(x, offset) simd_shuffle_xor(x, offset)
  #define FOUR(T, p) (*reinterpret_cast<const device Four<T>*>(p))
  #define PUT_FOUR(T, p) (*reinterpret_cast<device Four<T>*>(p))
  #define READONLY const device
""",
}


def backend() -> Backend | None:
    """What the kernels are compiled for on the default device, where they are used there."""
    if mx.default_device() != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal" if os.environ.get("OMLX_QUEUE_METAL_KERNEL") == "1" else None
    return "cuda" if mx.cuda.is_available() else None


def source(platform: Backend, body: str) -> str:
    """A body with what its macros mean on a platform."""
    return _PROLOGUES[platform] + body


@cache
def kernel(
    platform: Backend, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str
) -> Any:
    """A kernel, compiled when it first runs with new template arguments."""
    make = mx.fast.cuda_kernel if platform == "cuda" else mx.fast.metal_kernel
    return make(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=source(platform, body),
        header=HEADER,
    )
