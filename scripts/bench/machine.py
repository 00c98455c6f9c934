"""What figures were taken on."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import mlx.core as mx


def described() -> dict[str, Any]:
    """The machine, the device, and the versions that matter, for a page of results."""
    device = mx.default_device()
    name = mx.device_info().get("device_name", "") if device == mx.gpu else ""
    versions = {"python": platform.python_version()}
    for package in ("mlx", "mlx-lm"):
        versions[package] = importlib.metadata.version(package)
    return {
        "device": str(name) or f"{platform.machine()} processor",
        "system": f"{platform.system()} {platform.machine()}",
        "cores": _cores(),
        "versions": versions,
    }


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
