"""scripts/setup finds a Python and makes .venv, also after a run that was interrupted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "scripts/setup"
# Makes environments that hold itself. Fails the version check if named in TOO_OLD.
PYTHON = """#!/bin/sh
case "$*" in
  -c*) case " $TOO_OLD " in *" ${0##*/} "*) exit 1 ;; esac ;;
  "-m venv --clear .venv")
    echo "venv ${0##*/}" >> calls
    sleep "${VENV_SECONDS:-0}"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "pip ${PIP_EXIT:-0}" >> calls; exit "${PIP_EXIT:-0}" ;;
esac
"""


HEADER = "mlx/include/mlx/backend/cpu/compiled_preamble.h"
COMPILER = 'for word; do last=$word; done; echo text > "$last"'


class Checkout:
    """A folder with scripts/setup, and stand-ins for Python as the only ones on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._bin = folder, folder / "bin"
        (folder / "scripts").mkdir()
        shutil.copy(SETUP, folder / "scripts")
        self._bin.mkdir()
        for tool in ("bash", "sh", "dirname", "rm", "mkdir", "cp", "touch", "sleep"):
            (self._bin / tool).symlink_to(str(shutil.which(tool)))
        self.header = folder / ".venv/lib/python3.12/site-packages" / HEADER
        self.venv_python = folder / ".venv/bin/python"
        self.project = folder / "pyproject.toml"
        self.project.touch()

    def add(self, *names: str) -> None:
        for name in names:
            (self._bin / name).write_text(PYTHON)
            (self._bin / name).chmod(0o755)

    def add_tool(self, name: str, program: str) -> None:
        (self._bin / name).write_text(f"#!/bin/sh\n{program}\n")
        (self._bin / name).chmod(0o755)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._folder / "scripts/setup", "worker"],
            env={"PATH": str(self._bin), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        """What was done since the last call."""
        calls = self._folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({}, "python3"),
        ({"PYTHON": "python3.12"}, "python3.12"),
        ({"PYTHON": "none"}, "python3"),
        ({"TOO_OLD": "python3"}, "python3.14"),
        ({"TOO_OLD": "python3 python3.14"}, "python3.12"),
    ],
)
def test_the_python_asked_for_comes_first_then_the_usual_one_then_the_newest(
    checkout: Checkout, environment: dict[str, str], taken: str
) -> None:
    checkout.add("python3", "python3.12", "python3.14")
    assert checkout.run(**environment).returncode == 0
    assert checkout.calls() == [f"venv {taken}", "pip 0"]


def test_without_a_python_the_message_names_the_remedy(checkout: Checkout) -> None:
    result = checkout.run()
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr
    assert "set PYTHON" in result.stderr


def test_a_second_run_does_nothing(checkout: Checkout) -> None:
    checkout.add("python3")
    checkout.run()
    checkout.calls()
    assert checkout.run().stderr == ""
    assert checkout.calls() == []


@pytest.mark.slow
def test_an_environment_that_takes_long_has_a_word_meanwhile(checkout: Checkout) -> None:
    checkout.add("python3")
    told = checkout.run(VENV_SECONDS="12").stderr.splitlines()
    assert told[0] == "making .venv with python3 ..."
    assert re.fullmatch(r"  \d+ s: making \.venv with python3 \.\.\.", told[1])


def test_an_interrupted_installation_is_done_again_from_the_start(checkout: Checkout) -> None:
    checkout.add("python3")
    assert checkout.run(PIP_EXIT="130").returncode == 130
    checkout.calls()
    assert checkout.run().returncode == 0
    assert checkout.calls() == ["venv python3", "pip 0"]


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Checkout) -> None:
    checkout.add("python3")
    checkout.run()
    checkout.calls()
    checkout.venv_python.unlink()
    checkout.venv_python.symlink_to(os.devnull + "/gone")
    assert checkout.run().returncode == 0
    assert checkout.calls() == ["venv python3", "pip 0"]


def test_a_changed_project_is_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.add("python3")
    checkout.run()
    checkout.calls()
    later = checkout.venv_python.stat().st_mtime + 60
    os.utime(checkout.project, (later, later))
    assert checkout.run().returncode == 0
    assert checkout.calls() == ["pip 0"]


@pytest.mark.parametrize(
    ("system", "compiler", "made"),
    [
        ("Linux", COMPILER, True),
        ("Linux", f"{COMPILER}; echo 'no such option' >&2; exit 1", False),
        ("Darwin", COMPILER, False),
    ],
)
def test_an_environment_of_an_earlier_version_gets_the_compiled_header(
    checkout: Checkout, system: str, compiler: str, made: bool
) -> None:
    checkout.add("python3")
    checkout.run()
    checkout.header.parent.mkdir(parents=True)
    checkout.header.touch()
    checkout.add_tool("g++", compiler)
    checkout.add_tool("uname", f"echo {system}")
    told = checkout.run()
    assert (told.returncode, "no such option" in told.stderr) == (0, False)
    assert checkout.header.with_name("compiled_preamble.h.gch").exists() == made
