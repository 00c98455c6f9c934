"""Run a kernel's source on the CPU, compiled by g++: every thread of a block, one block at a time.

A thread is a fiber. Shuffles and barriers let the others of its warp or block come up to it, so
what threads exchange is as it is on a GPU. Their order within a block is not.
"""

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
#include <functional>
#include <vector>
#include <ucontext.h>
{header}
struct Meeting {{ int alive = 0, arrived = 0, number = 0; }};
struct Thread {{ ucontext_t context; std::vector<char> stack; bool over = false; int id; }};
static ucontext_t scheduler;
static Thread* running;
static Meeting block;
static std::vector<Meeting> warps;
static std::vector<float> told;
static std::function<void(int)> work;

static void meet(Meeting& meeting) {{
  const int number = meeting.number;
  if (++meeting.arrived == meeting.alive) {{
    meeting.arrived = 0;
    ++meeting.number;
  }}
  while (meeting.number == number) swapcontext(&running->context, &scheduler);
}}

static void leave(Meeting& meeting) {{
  if (--meeting.alive && meeting.arrived == meeting.alive) {{
    meeting.arrived = 0;
    ++meeting.number;
  }}
}}

static float across(float x, int offset) {{
  const int id = running->id;
  told[id] = x;
  meet(warps[id / 32]);
  const float other = told[id ^ offset];
  meet(warps[id / 32]);
  return other;
}}

static void begin() {{
  work(running->id);
  leave(warps[running->id / 32]);
  leave(block);
  running->over = true;
  swapcontext(&running->context, &scheduler);
}}

static void run_block(int threads) {{
  std::vector<Thread> all(threads);
  block = Meeting{{threads}};
  warps.assign((threads + 31) / 32, Meeting{{}});
  told.assign(threads, 0.0f);
  for (int id = 0; id < threads; ++id) {{
    ++warps[id / 32].alive;
    all[id].id = id;
    all[id].stack.resize(1 << 16);
    getcontext(&all[id].context);
    all[id].context.uc_stack.ss_sp = all[id].stack.data();
    all[id].context.uc_stack.ss_size = all[id].stack.size();
    makecontext(&all[id].context, begin, 0);
  }}
  for (int over = 0; over < threads;) {{
    for (Thread& thread : all) {{
      if (thread.over) continue;
      running = &thread;
      swapcontext(&scheduler, &thread.context);
      over += thread.over;
    }}
  }}
}}

#define ACROSS(x, offset) across(x, offset)
#define FOUR(T, p) (*reinterpret_cast<const Four<T>*>(p))
#define PUT_FOUR(T, p) (*reinterpret_cast<Four<T>*>(p))
#define READONLY const
#define EXP(x) std::exp(x)
#define ROWS {rows}
#define SHARED static
#define BARRIER meet(block)
static inline float rsqrtf(float x) {{ return 1.0f / std::sqrt(x); }}
using T = float;
using TQ = float;
{constants}
static void one({arguments}, const int lane, const int row, const int n) {{
{body}
}}
extern "C" void run({arguments}) {{
  for (int n = 0; n < {vectors}; ++n) {{
    for (int first = 0; first < {rows}; first += {block_rows}) {{
      work = [=](int id) {{ one({names}, id % {lanes}, first + id / {lanes}, n); }};
      run_block({lanes} * {block_rows});
    }}
  }}
}}
"""


def run(
    body: str,
    inputs: Mapping[str, mx.array],
    outputs: Mapping[str, Sequence[int]],
    constants: Mapping[str, int],
    *,
    grid: tuple[int, int, int],
    block_rows: int,
    folder: Path,
) -> list[np.ndarray]:
    """What a float32 kernel writes; numbers that it does not write are NaN.

    Args:
        outputs: their names and shapes.
        constants: its template arguments, but for types.
        grid: its threads: lanes, which are those of a block, rows and vectors.
        block_rows: the rows of a block.
    """
    lanes, rows, vectors = grid
    given = {name: np.ascontiguousarray(np.array(array)) for name, array in inputs.items()}
    written = {name: np.full(shape, np.nan, np.float32) for name, shape in outputs.items()}
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
        lanes=lanes,
        rows=rows,
        block_rows=block_rows,
        vectors=vectors,
    )
    (folder / "kernel.cpp").write_text(code)
    library = str(folder / f"kernel{len(list(folder.iterdir()))}.so")
    compiler = ["g++", "-O1", "-shared", "-fPIC", str(folder / "kernel.cpp"), "-o", library]
    subprocess.run(compiler, check=True)
    pointers: list[Any] = [array.ctypes.data_as(ctypes.c_void_p) for array in everything.values()]
    ctypes.CDLL(library).run(*pointers)
    return list(written.values())


def _ctype(array: np.ndarray) -> str:
    return "int" if array.dtype == np.int32 else "float"
