"""Virtual environments with packages from the index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def install(folder: Path, *requirements: str) -> Path:
    """The packages in a virtual environment; returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--retries", "1", *requirements]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        assert "NewConnectionError" in done.stderr, done.stderr
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip()[-200:]}")
    return folder / "bin"
