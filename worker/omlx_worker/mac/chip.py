"""The chip of a Mac."""

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
    if known := name(run):
        found["chip"] = known
    with suppress(OSError, CalledProcessError):
        told = run(["ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"])
        if cores := re.search(rb'"gpu-core-count" = (\d+)', told):
            found["gpu_cores"] = int(cores[1])
    return found


def name(run: Callable[[Sequence[str]], bytes] = check_output) -> str | None:
    """The chip's name, such as ``Apple M3 Max``; None if macOS does not tell."""
    with suppress(OSError, CalledProcessError):
        return run(["sysctl", "-n", "machdep.cpu.brand_string"]).decode().strip()
    return None
