"""What docker-compose.yml says."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@cache
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
        "services"
    ]
    return found


def _dashboard_shell() -> tuple[str, str]:
    """The two commands of the dashboard: install, and run."""
    _, _, script = shlex.split(services()["dashboard"]["command"])
    install, run = script.split("&&")
    return install, run


def pinned_packages() -> list[str]:
    return [word for word in shlex.split(_dashboard_shell()[0]) if "==" in word]


def dashboard_command() -> list[str]:
    return shlex.split(_dashboard_shell()[1])[1:]
