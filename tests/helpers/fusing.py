"""Whether MLX fuses what it compiles: each fused kernel costs g++ more than a second on a CPU.

Without, a compiled function is still traced once a shape and runs the graph that was traced, so
what a trace must not hold still shows. Only the operations of a kernel run one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

# `CompileMode` of mlx/compile.h, which Python does not have.
_WITHOUT_FUSION, _ALL = 2, 3
_SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"


def _set_mode(mode: int) -> None:
    [library] = (Path(mx.__file__).parent / "lib").glob("libmlx.*[!a]")
    ctypes.CDLL(str(library))[_SET_MODE](mode)


@contextmanager
def fused(fuses: bool) -> Iterator[None]:
    """Fuse inside of the block, or do not."""
    enable, before = mx.enable_compile, _WITHOUT_FUSION if fuses else _ALL
    mode = _ALL if fuses else _WITHOUT_FUSION
    _set_mode(mode)
    with pytest.MonkeyPatch.context() as patch:
        # `omlx_worker.engine.kernels.compiling.unfused` turns it on again.
        patch.setattr(mx, "enable_compile", lambda: _set_mode(mode))
        yield
    _set_mode(before)
