"""Runs on the CPU what MLX would compile for Metal, and tells faults that a GPU would hide.

MLX itself writes the kernel: the header, a signature that it generates, and the source. It does so
without a Mac too, for a function that is exported. `language` refuses what Metal forbids and gives
pointers the type of their address space. g++ compiles that against ``metal.h``, and ``runtime.cpp``
runs the threads of a group as fibers. The first fault ends the run: an access outside of a buffer,
a race, a barrier that not all threads reach, a number read before it is written, an output that is
never written.

None of this has been compared with a GPU. It tells neither how fast a kernel is nor how Metal's
compiler rounds.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.kernels import source as kernels
from omlx_worker.engine.kernels.source import HEADER
from tests.helpers.metal.language import Refused, translated

HERE = Path(__file__).parent

MOST_THREADS = 1024
"""Threads of a group on Metal."""

MOST_BUFFERS = 31
"""Buffers of a kernel on Metal."""

_LIBRARY = ("-shared", "-fPIC", "-fno-exceptions", "-fno-rtti")
_KERNEL = (
    *("-O1", "-include", str(HERE / "metal.h"), "-pedantic-errors"),
    *("-ffp-contract=off", "-fsingle-precision-constant", "-ftrivial-auto-var-init=pattern"),
    *("-Wno-attributes", "-Wno-unknown-pragmas"),
    # The runtime takes the sanitizer's reports, so its own library is left out.
    "-fsanitize=bounds,integer-divide-by-zero,shift,signed-integer-overflow",
    *("-nodefaultlibs", "-lgcc"),
)


class Fault(Exception):
    """What a kernel does wrong while it runs."""


class _Region(ctypes.Structure):
    """A buffer, as ``metal.h`` has it."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_long),
        ("name", ctypes.c_char_p),
        ("marks", ctypes.c_void_p),
        ("granule", ctypes.c_int),
        ("is_threadgroup", ctypes.c_int),
        ("read", ctypes.c_long),
    )


BYTES_READ: dict[str, int] = {}
"""Of each buffer by the last kernel, a byte as often as it was read."""


def launch(
    platform: str,
    name: str,
    source: str,
    inputs: Mapping[str, mx.array],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    template: Mapping[str, Any],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    header: str = HEADER,
) -> list[mx.array]:
    """Emulate `omlx_worker.engine.kernels.source.launch` for Metal.

    Raises:
        Refused: Metal does not compile the source.
        Fault: the kernel does what it may not.
    """
    assert platform == "metal"

    def export(*arrays: mx.array) -> list[mx.array]:
        named = dict(zip(inputs, arrays, strict=True))
        sizes = template, grid, threadgroup
        return kernels.launch("metal", name, source, named, outputs, *sizes, header)

    told: list[dict[str, Any]] = []
    mx.export_function(told.append, export, *inputs.values())
    [kernel] = [part for part in told if part.get("name") == "CustomKernel"]
    code = kernel["arguments"][1]
    sizes = [min(pair) for pair in zip(grid, threadgroup, strict=True)]
    if math.prod(threadgroup) > MOST_THREADS:
        raise Refused(f"{math.prod(threadgroup)} threads in a group, of {MOST_THREADS}")
    given = {name: _as_numpy(array) for name, array in inputs.items()}
    made = {name: _as_numpy(mx.zeros(*of)) for name, of in outputs.items()}
    for array in made.values():
        array.view(np.uint8).fill(0xFF)
    buffers = {
        parameter: _bound(parameter, given | made)
        for _, parameter, attribute, _ in _parameters(code)
        if attribute == "buffer"
    }
    if len(buffers) > MOST_BUFFERS:
        raise Refused(f"{len(buffers)} buffers, of {MOST_BUFFERS}")
    regions = (_Region * len(buffers))(
        *(
            _Region(array.ctypes.data, array.nbytes, parameter.encode(), None, array.itemsize, 0, 0)
            for parameter, array in buffers.items()
        )
    )
    fault = ctypes.create_string_buffer(512)
    _runtime().emulator_run(
        _compiled(code).emulator_kernel,
        *(regions, len(buffers) - len(made), len(made)),
        *((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*sizes), fault),
    )
    if fault.value:
        raise Fault(f"{name}: {fault.value.decode()}")
    BYTES_READ.clear()
    BYTES_READ.update((region.name.decode(), region.read) for region in regions)
    return [_as_mlx(made[name], dtype) for name, (_, dtype) in outputs.items()]


def _parameters(code: str) -> list[tuple[str, str, str, str]]:
    """The type, name, attribute and buffer number of each parameter that MLX wrote."""
    signature = code[code.index("[[kernel]] void ") :].partition(") {\n")[0]
    return re.findall(r"(\w+)[*&]? (\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", signature)


def _bound(parameter: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """What MLX binds to a parameter: an array, or its shape, strides or number of dimensions."""
    if parameter in arrays:
        return arrays[parameter]
    of, _, what = parameter.rpartition("_")
    if what == "strides":
        return np.array(arrays[of].strides, np.int64) // arrays[of].itemsize
    return np.array(arrays[of].shape if what == "shape" else arrays[of].ndim, np.int32)


@cache
def _compiled(code: str) -> ctypes.CDLL:
    """A kernel as a library, which finds the runtime's functions in the process."""
    written, _, instantiated = code.partition("\ntemplate [[host_name(")
    name = re.search(r"\[\[kernel\]\] void (\w+)\(", written)
    typed = re.search(r"decltype\((.*)\) ", instantiated) or name
    assert typed
    given = [
        f"emulator::Buffer{{regions + {buffer}}}"
        if attribute == "buffer"
        else f"uint3{{place.{name}[0], place.{name}[1], place.{name}[2]}}"
        if kind == "uint3"
        else f"place.{name}"
        for kind, name, attribute, buffer in _parameters(written)
    ]
    driver = f"""
extern "C" void emulator_kernel(const emulator::Region* regions) {{
  const emulator::Place& place = *emulator::emulator_place();
  {typed[1]}({", ".join(given)});
}}
"""
    plain = _gcc(("-E", "-undef", "-D__METAL__"), written)
    # GCC's own line directives are none of C++'s.
    plain = re.sub(r'^# ([1-9]\d*) "<stdin>".*', r"#line \1", plain, flags=re.MULTILINE)
    plain = re.sub(r"^# .*", "", plain, flags=re.MULTILINE)
    library = Path(_folder().name) / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.so"
    _gcc((*_LIBRARY, *_KERNEL, "-o", str(library)), translated(plain) + driver)
    return ctypes.CDLL(str(library))


@cache
def _runtime() -> ctypes.CDLL:
    library = Path(_folder().name) / "runtime.so"
    code = (HERE / "runtime.cpp").read_text()
    _gcc((*_LIBRARY, "-O2", f"-I{HERE}", "-o", str(library)), code)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For compiled kernels, until the process ends."""
    return tempfile.TemporaryDirectory(prefix="metal-")


def _gcc(arguments: Sequence[str], source: str) -> str:
    ran = subprocess.run(
        ["g++", "-std=c++17", "-x", "c++", "-", *arguments],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        input=source,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise Refused(ran.stderr)
    return ran.stdout


def _has_gcc() -> bool:
    """Whether g++ is GCC 12 or newer; on a Mac it is another compiler."""
    try:
        macros = _gcc(("-dM", "-E"), "")
    except (OSError, Refused):
        return False
    version = re.search(r"__GNUC__ (\d+)", macros)
    return "__clang__" not in macros and version is not None and int(version[1]) >= 12


needs_compiler = pytest.mark.skipif(not _has_gcc(), reason="no GCC of version 12 or newer")


def _as_numpy(array: mx.array) -> np.ndarray:
    """The same bytes in one piece; bfloat16 as integers."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, order="C")


def _as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    made = mx.array(array)
    return made.view(dtype) if dtype == mx.bfloat16 else made
