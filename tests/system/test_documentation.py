"""The commands of the documentation run as printed, on the files of ``examples/data``."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.helpers.documentation import (
    ENDLESS,
    IN_THE_BACKGROUND,
    NOT_TYPED,
    PAGES,
    ROOT,
    commands_of,
)
from tests.helpers.redis_server import redis_server

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

FEW_ROWS = 100
TIMED_OUT = 124


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of ``examples/data``, the longest of them cut."""
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    long = tmp_path / "data" / "releases-500.csv"
    long.write_text("".join(long.read_text().splitlines(keepends=True)[: 1 + FEW_ROWS]))
    return tmp_path / "data"


@pytest.fixture
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """For a shell of a user who has a Redis server, and nothing in his home."""
    programs = Path(sys.executable).parent
    with redis_server() as server:
        yield os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(folder),
            "OMLX_QUEUE_REDIS_URL": server.url,
            "RQ_REDIS_URL": server.url,
            "MLX_DISABLE_COMPILE": "1",
        }


@contextmanager
def worker(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A worker of the demo model."""
    with (folder / "worker.log").open("w") as log:
        command = ["omlx-worker", "run", "-m", "demo", "--name", "documented"]
        process = subprocess.Popen(command, cwd=folder, env=environment, stderr=log)
    try:
        subprocess.run(["bash", "-c", UNTIL_SERVED], env=environment, check=True, timeout=120)
        yield
    finally:
        process.kill()
        process.wait()


UNTIL_SERVED = "until omlx-submit models 2>&1 | grep -q demo; do sleep 1; done"


def typed(command: str) -> str:
    """What is typed for a printed command."""
    if command in IN_THE_BACKGROUND:
        return f"{IN_THE_BACKGROUND[command]} 2>> background.log &"
    if command in ENDLESS:
        return f"timeout --signal=INT --kill-after=30 12 {command}; [ $? = {TIMED_OUT} ]"
    return command


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_printed(
    page: str, folder: Path, environment: dict[str, str]
) -> None:
    commands = [command for command in commands_of(PAGES[page]) if command not in NOT_TYPED]
    script = "".join(f'{typed(command)}\necho "=== $?" >&3\n' for command in commands)
    with worker(folder, environment), (folder / "codes").open("w") as codes:
        shell = subprocess.Popen(
            ["bash", "-c", f"exec 3>&1 >output.txt 2>&1\n{script}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=codes,
            start_new_session=True,
        )
        try:
            shell.wait(800)
        finally:
            # What it left in the background.
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    told = re.findall(r"=== (\d+)", (folder / "codes").read_text())
    output = (folder / "output.txt").read_text()
    failed = [(command, code) for command, code in zip(commands, told, strict=True) if code != "0"]
    assert failed == [], output
    assert "Traceback" not in output
    if page == "docs/tutorial.md":
        assert f"{FEW_ROWS + 1} table.csv\n" in output
        assert f" of {FEW_ROWS} rows are right" in output
