"""``omlx-worker service``: a worker that the system starts, and starts again when it fails."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from dotenv import dotenv_values
from pydantic import ValidationError

from omlx_producer.environment import DOTENV, PREFIX, app_folder
from omlx_producer.program import INVALID, fail, option
from omlx_producer.terminal import local_time, one_cell, write
from omlx_worker.mac.launchd import LaunchAgent
from omlx_worker.options import (
    ModelCommand,
    describe,
    read_settings,
    require_mlx,
    settings_options,
)
from omlx_worker.service.systemd import UserUnit
from omlx_worker.settings import WorkerSettings

NOT_RUNNING = 1
RESULTS_SECONDS = 15
"""For the last results, beyond ``drain_timeout``. Then the worker is killed."""

_OWN = {"log_file", "burst"}
_HEADER = f"""\
# Settings of the service: any option of `omlx-worker run`, as {PREFIX}<OPTION>.
# After a change: omlx-worker service install
"""


@click.group()
def service() -> None:
    """Run a worker in the background, also after a restart."""


@service.command(cls=ModelCommand)
@settings_options(WorkerSettings.model_fields.keys() - _OWN)
def install(**options: Any) -> None:
    """Install the service and start it, or start it anew.

    Takes the options of run and writes their values to a file of settings. Without options that
    file stays as it is, with your changes.
    """
    require_mlx()
    manager, path = _manager(), _folder() / DOTENV
    with _failures_told(manager):
        if not path.exists() or any(value is not None for value in options.values()):
            _write(path, read_settings(options)[0])
        seconds = math.ceil(_read(path).drain_timeout) + RESULTS_SECONDS
        program = [sys.executable, "-m", "omlx_worker", "run", "--log-file", str(_log())]
        manager.install(program, _log(), _environment(), seconds)
        _tell(manager)


@service.command()
def uninstall() -> None:
    """Stop the service and remove it. Its settings and log stay."""
    manager = _installed()
    with _failures_told(manager):
        manager.uninstall()
    write(f"removed {manager.path}; settings and log stay in {_folder()}\n")


@service.command()
def status() -> None:
    """Say whether the service runs, and where its files are."""
    manager = _installed()
    with _failures_told(manager):
        running = _tell(manager)
    sys.exit(0 if running else NOT_RUNNING)


@service.command()
@option("-f", "--follow", is_flag=True, help="Go on with what is logged from now on.")
@option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="How many of the last lines.",
)
def logs(follow: bool, lines: int) -> None:
    """Print the end of the service's log."""
    if not _log().exists():
        fail(INVALID, f"{_log()}: not there; start the service with: omlx-worker service install")
    # -F goes on in the next file when the worker begins one.
    subprocess.run(["tail", "-n", str(lines), *["-F"] * follow, str(_log())], check=False)


def run_command(command: Sequence[str]) -> str:
    """Run a command of the system and return what it printed.

    Raises:
        CalledProcessError, FileNotFoundError: if it fails, or there is none.
    """
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _manager() -> LaunchAgent | UserUnit:
    return LaunchAgent(run_command) if sys.platform == "darwin" else UserUnit(run_command)


def _installed() -> LaunchAgent | UserUnit:
    manager = _manager()
    if not manager.path.exists():
        fail(INVALID, "no service is installed; do it with: omlx-worker service install -m MODEL")
    return manager


def _folder() -> Path:
    """Where the service runs. Its settings are the file .env there."""
    return app_folder() / "service"


def _log() -> Path:
    return _folder() / "worker.log"


def _environment() -> dict[str, str]:
    """What a worker in this shell would have beside settings: programs, caches of models."""
    names, prefixes = ("PATH", "PYTHONPATH", "XDG_DATA_HOME"), ("HF_", "MLX_", "LD_")
    return {k: v for k, v in os.environ.items() if k in names or k.startswith(prefixes)}


def _read(path: Path) -> WorkerSettings:
    try:
        return WorkerSettings(_env_file=path)  # type: ignore[call-arg]
    except ValidationError as error:
        fail(INVALID, f"{path}: {describe(error)}")


def _write(path: Path, settings: WorkerSettings) -> None:
    """Write what was set, and the Redis server; other folders by their whole paths."""
    from omlx_producer.connection import redis_url

    if "model" not in settings.model_fields_set:
        fail(INVALID, "--model: missing; name the model that the service serves")
    values = {name: getattr(settings, name) for name in settings.model_fields_set - _OWN}
    if not settings.embedded_redis:
        values["redis_url"] = redis_url(settings.redis_url, DOTENV)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A URL may hold a password.
    path.touch(mode=0o600)
    lines = (f"{PREFIX}{name.upper()}={_quoted(name, values[name])}\n" for name in sorted(values))
    path.write_text(_HEADER + "".join(lines))


def _quoted(name: str, value: object) -> str:
    path = Path(str(value)).expanduser().absolute()
    is_model = name in ("model", "draft_model", "mtp_from") and value != "demo"
    text = str(path if isinstance(value, Path) or (is_model and path.is_dir()) else value)
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@contextmanager
def _failures_told(manager: LaunchAgent | UserUnit) -> Iterator[None]:
    """End the program with a sentence if a command of the system or a file fails."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip() or f"exit code {error.returncode}"
        fail(INVALID, f"{' '.join(error.cmd)}: {one_cell(told)}; {manager.remedy}")
    except OSError as error:
        remedy = "use omlx-worker run, or make it usable for you, and try again"
        fail(INVALID, f"{error.filename}: {error.strerror}; {remedy}")


def _tell(manager: LaunchAgent | UserUnit) -> bool:
    """Print the state of the service and where its files are. True if it runs."""
    pid, code = manager.state()
    ended = "" if code is None else f"; ended with status {code}, the log says why"
    lines = {
        "model": dotenv_values(_folder() / DOTENV).get(f"{PREFIX}MODEL") or "demo",
        "state": f"runs since {_began(pid)}, process {pid}" if pid else f"not running{ended}",
        "starts": manager.starts,
        "settings": _folder() / DOTENV,
        "log": f"{_log()} (omlx-worker service logs -f)",
        "service": manager.path,
    }
    write("".join(f"{name:<9}{one_cell(str(value))}\n" for name, value in lines.items()))
    return bool(pid)


def _began(pid: int) -> str:
    # In C, so that Python reads the names of months.
    told = run_command(["env", "LC_ALL=C", "ps", "-o", "lstart=", "-p", str(pid)])
    return local_time(datetime.strptime(told.strip(), "%a %b %d %H:%M:%S %Y"))
