"""The chip of a Mac, for files of figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import CalledProcessError, check_output
from typing import Any


def facts(run: Callable[[Sequence[str]], bytes] = check_output) -> dict[str, Any]:
    """The chip's name and the number of its GPU's cores; what macOS does not tell is left out.

    Args:
        run: runs a command and returns its output.
    """
    found: dict[str, Any] = {}
    if sys.platform != "darwin":
        return found
    with suppress(OSError, CalledProcessError):
        found["chip"] = run(["sysctl", "-n", "machdep.cpu.brand_string"]).decode().strip()
    with suppress(OSError, CalledProcessError):
        told = run(["ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"])
        if cores := re.search(rb'"gpu-core-count" = (\d+)', told):
            found["gpu_cores"] = int(cores[1])
    return found
