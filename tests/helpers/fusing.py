"""Whether MLX fuses what it compiles: each fused kernel costs g++ up to a second on a CPU.

Without fusion, a compiled function is still traced once a shape and runs the graph that was traced,
so that stale traces show. Only the operations of a kernel run one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

# `mlx::core::set_compile_mode` and two values of `CompileMode` (mlx/compile.h). Python has only
# the modes "disabled", which traces nothing, and "enabled".
_SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
_NO_FUSE, _ENABLED = 2, 3


def _set_mode(mode: int) -> None:
    [library] = (Path(mx.__file__).parent / "lib").glob("libmlx.*[!a]")
    ctypes.CDLL(str(library))[_SET_MODE](mode)


@contextmanager
def fused(fuses: bool) -> Iterator[None]:
    """Fuse inside of the block, or do not."""
    mode = _ENABLED if fuses else _NO_FUSE
    _set_mode(mode)
    with pytest.MonkeyPatch.context() as patch:
        # `omlx_worker.engine.kernels.compiling.unfused` turns it on again.
        patch.setattr(mx, "enable_compile", lambda: _set_mode(mode))
        yield
    mx.enable_compile()
