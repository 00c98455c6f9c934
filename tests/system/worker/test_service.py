"""The service runs under the user's systemd, where there is one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omlx_worker.service.systemd import UNIT


def systemctl(*words: str) -> str:
    return subprocess.run(
        ["systemctl", "--user", *words], capture_output=True, text=True, check=True
    ).stdout


def _answers() -> bool:
    try:
        return systemctl("show", UNIT, "--property=LoadState") == "LoadState=not-found\n"
    except (OSError, subprocess.CalledProcessError):
        return False


pytestmark = [
    pytest.mark.skipif(not _answers(), reason="no systemd of the user, or a service of his own"),
]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs ``omlx-worker service``; the service is removed at the end."""
    environment = os.environ | {
        "XDG_DATA_HOME": str(tmp_path / "a folder of 100%"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MLX_DISABLE_COMPILE": "1",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "omlx_worker", "service", *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    yield run
    run("uninstall")
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_a_service_runs_starts_again_when_it_is_killed_and_ends(
    service: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    def listening(times: int) -> None:
        for _ in range(600):
            if service("logs", "-n", "1000").stdout.count("is ready: worker") == times:
                return
            time.sleep(0.2)
        raise AssertionError(service("logs").stdout)

    installed = service("install", "-m", "demo", "--embedded-redis", "--redis-dir", "redis")
    assert installed.returncode == 0, installed.stderr
    listening(1)
    status = service("status")
    assert (status.returncode, "runs since" in status.stdout) == (0, True)
    os.kill(int(systemctl("show", UNIT, "--property=MainPID", "--value")), signal.SIGKILL)
    listening(2)
    assert service("uninstall").returncode == 0
    log = service("logs")
    assert "draining" in log.stdout
    assert systemctl("show", UNIT, "--property=LoadState") == "LoadState=not-found\n"
