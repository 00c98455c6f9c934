"""The worker as an agent of launchd. macOS starts it at login, and again when it fails."""

from __future__ import annotations

import os
import plistlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError

LABEL = "com.github.omlx-queue.worker"
RESTART_SECONDS = 30


class LaunchAgent:
    """The agent of this user, in the session of the Mac's screen.

    Every method may raise CalledProcessError, if launchd refuses, and OSError.

    Args:
        run: runs a command and returns its output.

    Attributes:
        path: its property list.
        starts: when launchd starts it.
        remedy: for what launchd refuses.
    """

    starts = "at login"
    remedy = "log in at the Mac's screen as this user, or turn automatic login on, and try again"

    def __init__(self, run: Callable[[Sequence[str]], str]) -> None:
        self.path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._run = run
        self._session = f"gui/{os.getuid()}"
        self._agent = f"{self._session}/{LABEL}"

    def install(
        self, program: Sequence[str], log: Path, environment: Mapping[str, str], stop_seconds: int
    ) -> None:
        """Start the agent, now and at every login. One that runs is stopped before.

        Args:
            program: runs in the log's folder.
            log: the file for its stderr.
            stop_seconds: between SIGTERM and SIGKILL.
        """
        self._stop()
        content = {
            "Label": LABEL,
            "ProgramArguments": list(program),
            "EnvironmentVariables": dict(environment),
            "WorkingDirectory": str(log.parent),
            "StandardErrorPath": str(log),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": stop_seconds,
            # Other types get less of the processors and the disk.
            "ProcessType": "Interactive",
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        self.path.write_bytes(plistlib.dumps(content))
        self._run(["launchctl", "enable", self._agent])
        self._run(["launchctl", "bootstrap", self._session, str(self.path)])

    def uninstall(self) -> None:
        """Stop the agent and delete its property list."""
        self._stop()
        self.path.unlink()

    def state(self) -> tuple[int | None, int | None]:
        """The process that runs, and the status of the last one that ended."""
        try:
            told = self._run(["launchctl", "print", self._agent])
        except CalledProcessError:
            return None, None
        found = (re.search(rf"^\t{name} = (\d+)", told, re.M) for name in ("pid", "last exit code"))
        pid, code = (match and int(match[1]) for match in found)
        return pid, code

    def _stop(self) -> None:
        """Unload the agent, and wait until launchd can load it again: until its process ended."""
        with suppress(CalledProcessError):
            # Fails where none is loaded, and also while the process takes its time.
            self._run(["launchctl", "bootout", self._agent])
        with suppress(CalledProcessError):
            while self._run(["launchctl", "print", self._agent]):
                time.sleep(0.2)
