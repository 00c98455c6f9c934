"""The worker as a unit of the user's systemd, which starts it again when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

UNIT = "omlx-worker.service"
RESTART_SECONDS = 30

# KillMode: SIGTERM for the worker alone; its Redis server must outlive it.
_CONTENT = """\
[Unit]
Description=Worker of omlx-queue
StartLimitIntervalSec=0

[Service]
ExecStart={program}
WorkingDirectory={folder}
Environment={environment}
StandardError=append:{log}
Restart=on-failure
RestartSec={retry}
TimeoutStopSec={stop}
KillMode=mixed

[Install]
WantedBy=default.target
"""


class UserUnit:
    """The unit of this user. Has what `LaunchAgent` has, with the same arguments and errors."""

    starts = "at login, until logout; for always: loginctl enable-linger"
    remedy = "log in as this user, not with su or sudo, and try again"

    def __init__(self, run: Callable[[Sequence[str]], str]) -> None:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        self.path = Path(base) / "systemd" / "user" / UNIT
        self._run = run

    def install(
        self, program: Sequence[str], log: Path, environment: Mapping[str, str], stop_seconds: int
    ) -> None:
        """Start the unit, now and at every login. One that runs is stopped before."""
        # Before anything is written: does systemd answer?
        self._systemctl("daemon-reload")
        content = _CONTENT.format(
            program=" ".join(_quoted(word).replace("$", "$$") for word in program),
            folder=_escaped(log.parent),
            environment=" ".join(_quoted(f"{name}={v}") for name, v in environment.items()),
            log=_escaped(log),
            retry=RESTART_SECONDS,
            stop=stop_seconds,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        self.path.write_text(content)
        self._systemctl("daemon-reload")
        self._systemctl("enable", UNIT)
        self._systemctl("restart", UNIT)

    def uninstall(self) -> None:
        """Stop the unit and delete its file."""
        self._systemctl("disable", "--now", UNIT)
        self.path.unlink()
        self._systemctl("daemon-reload")

    def state(self) -> tuple[int | None, int | None]:
        """The process that runs, and the status of the last one that ended."""
        told = self._systemctl("show", UNIT, "--property=MainPID", "--property=ExecMainStatus")
        values = dict(line.split("=", 1) for line in told.splitlines())
        return int(values["MainPID"]) or None, int(values["ExecMainStatus"])

    def _systemctl(self, *words: str) -> str:
        return self._run(["systemctl", "--user", *words])


def _escaped(text: object) -> str:
    return str(text).replace("%", "%%")


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
