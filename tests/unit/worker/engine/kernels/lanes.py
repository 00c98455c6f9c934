"""Run the body of a kernel on the CPU: compiled by g++, each lane with a vector to itself."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.kernels.source import HEADER

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

_FRAME = """
#include <cmath>
#include <cstddef>
{header}
#define ACROSS(x, offset) (x)
#define FOUR(T, p) (*reinterpret_cast<const Four<T>*>(p))
#define PUT_FOUR(T, p) (*reinterpret_cast<Four<T>*>(p))
#define READONLY const
static inline float rsqrtf(float x) {{ return 1.0f / std::sqrt(x); }}
using T = float;
constexpr int Lanes = 1;
{constants}
static void one({arguments}, const int lane, const int row, const int n) {{
{body}
}}
extern "C" void run({arguments}) {{
  for (int n = 0; n < {vectors}; ++n)
    for (int row = 0; row < {rows}; ++row) one({names}, 0, row, n);
}}
"""


def run(
    body: str,
    inputs: Mapping[str, mx.array],
    outputs: Mapping[str, Sequence[int]],
    constants: Mapping[str, int],
    rows: int,
    vectors: int,
    folder: Path,
) -> list[np.ndarray]:
    """What a float32 kernel writes.

    Args:
        outputs: their names and shapes.
        constants: its template arguments, but for ``T`` and ``Lanes``.
        rows, vectors: its grid's second and third size.
    """
    given = {name: np.ascontiguousarray(np.array(array)) for name, array in inputs.items()}
    written = {name: np.zeros(shape, np.float32) for name, shape in outputs.items()}
    shapes = {f"{name}_shape": np.array(array.shape, np.int32) for name, array in given.items()}
    kinds = {name: f"const {_ctype(array)}*" for name, array in (given | shapes).items()}
    kinds |= dict.fromkeys(written, "float*")
    everything = given | shapes | written
    code = _FRAME.format(
        header=HEADER,
        constants="\n".join(f"constexpr int {k} = {int(v)};" for k, v in constants.items()),
        arguments=", ".join(f"{kinds[name]} {name}" for name in everything),
        names=", ".join(everything),
        body=body,
        rows=rows,
        vectors=vectors,
    )
    (folder / "kernel.cpp").write_text(code)
    library = str(folder / "kernel.so")
    compiler = ["g++", "-O1", "-shared", "-fPIC", str(folder / "kernel.cpp"), "-o", library]
    subprocess.run(compiler, check=True)
    pointers: list[Any] = [array.ctypes.data_as(ctypes.c_void_p) for array in everything.values()]
    ctypes.CDLL(library).run(*pointers)
    return list(written.values())


def _ctype(array: np.ndarray) -> str:
    return "int" if array.dtype == np.int32 else "float"
