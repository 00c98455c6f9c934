"""The demo's workers, each a process of its own, so that one of them can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Self

import click
import redis

from omlx_producer.client.workers import read_workers
from omlx_producer.environment import PREFIX

LEASE_SECONDS = 3
LOAD_SECONDS = 120.0
STOP_SECONDS = 3.0
ALIAS = "demo"

_PROGRAM = "from omlx_worker.cli import main; main()"


class CrewMember:
    """``omlx-worker run`` with the demo model, as a child.

    Attributes:
        name: its name in RQ.
        pid: its process id.
    """

    def __init__(self, name: str, url: str, folder: Path, max_batch: int) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        options = {
            **{"model": "demo", "model-alias": ALIAS, "name": name, "redis-url": url},
            # The demo shows drafts, also where they do not pay.
            **{"mode": "mtp", "max-batch": max_batch, "lease-seconds": LEASE_SECONDS},
            **{"state-dir": folder, "redis-grace": 10},
        }
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "run", *given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=_environment(),
                # Ctrl-C in the terminal is for the demo.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def require_running(self) -> None:
        """End the demo with the last line of this worker's log if it has ended by itself."""
        if (code := self._process.poll()) is not None:
            last = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise click.ClickException(f"worker {self.name} ended with code {code}: {last}")

    def kill(self) -> None:
        """End it at once, as a crash would. Returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class Crew:
    """The workers as a context manager. Those that still run end with it.

    Args:
        names: a letter for each.

    Attributes:
        members: those that have not been killed.
    """

    def __init__(self, names: str, url: str, folder: Path, max_batch: int) -> None:
        self.members: list[CrewMember] = []
        self._names = names
        self._make = partial(CrewMember, url=url, folder=folder, max_batch=max_batch)

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                self.members.append(self._make(name))
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for member in self.members:
            if kind is None:
                member.stop()
            else:
                member.kill()

    def wait_until_ready(self, connection: redis.Redis) -> None:
        """Wait until every worker serves.

        Raises:
            click.ClickException: if one does not.
        """
        deadline = time.monotonic() + LOAD_SECONDS
        names = {member.name for member in self.members}
        while not names <= {worker.name for worker in read_workers(connection, ALIAS)}:
            self.require_running()
            if time.monotonic() > deadline:
                raise click.ClickException("the model did not load in time")
            time.sleep(0.05)

    def require_running(self) -> None:
        for member in self.members:
            member.require_running()

    def kill(self, name: str) -> CrewMember:
        """Kill a worker; returns what it was."""
        [victim] = [member for member in self.members if member.name == name]
        victim.kill()
        self.members.remove(victim)
        return victim


def _environment() -> dict[str, str]:
    """This process's, without the user's settings of workers."""
    import mlx.core as mx

    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    if mx.default_device() == mx.cpu:
        # The compiler takes most of a minute for a model that gains little from it.
        kept["MLX_DISABLE_COMPILE"] = "1"
    return kept
