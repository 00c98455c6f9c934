"""How much work MLX puts into one of Metal's command buffers. It reads it when it is imported.

Its own limits, 20 to 50 operations and 40 or 50 "MB", cut a step about once a layer. Others
measured 5 to 13% more speed with more operations on an M1 Ultra, and on large chips 5 to 57% more
with both; on an M5 nothing was gained.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping

from omlx_worker.mac import chip

OPERATIONS, MEGABYTES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"

_NEWEST = 4
"""The last generation of chips that gains."""
_MEGABYTES = ((96 << 30, 2000), (48 << 30, 400))
"""By the memory of the Mac, at least."""
_ELEMENT = 4
"""Bytes of an element, at most: MLX counts elements, 2**20 of them as a "MB"."""


def prepare_mlx(
    environment: MutableMapping[str, str] = os.environ,
    platform: str = sys.platform,
    name: str | None = None,
    memory: int | None = None,
) -> None:
    """Set both, but for what the user has set. Call it before MLX is imported.

    Args:
        name: of the chip, as macOS tells it; None to ask.
        memory: of the Mac, in bytes; None to ask.
    """
    if platform != "darwin":
        return
    generation = re.match(r"Apple M(\d+)", name or chip.name() or "")
    if not generation or int(generation[1]) > _NEWEST:
        return
    memory = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    environment.setdefault(OPERATIONS, "1000")
    for least, megabytes in _MEGABYTES:
        if memory >= least:
            environment.setdefault(MEGABYTES, str(megabytes))


def limits(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Both, for people; None where it is MLX's own."""
    return {name: environment.get(name) for name in (OPERATIONS, MEGABYTES)}


def held_back(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of arrays that buffers in flight can hold after they are freed; 0 for MLX's own."""
    megabytes = environment.get(MEGABYTES, "")
    return _ELEMENT * int(megabytes) << 20 if megabytes.isdecimal() else 0
