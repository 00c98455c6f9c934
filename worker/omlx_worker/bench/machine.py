"""The machine that figures are taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import mlx.core as mx


def describe() -> dict[str, Any]:
    """The machine, the device and the versions, for a file of results."""
    device = mx.default_device()
    name = mx.device_info().get("device_name", "") if device == mx.gpu else ""
    return {
        "device": str(name) or f"{platform.machine()} processor",
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("mlx", "mlx-lm")},
        },
    }


def cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
