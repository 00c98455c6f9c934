"""Where a worker keeps what should outlive it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def app_folder() -> Path:
    """This program's folder among a user's data; it may not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "omlx-queue"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "omlx-queue"
