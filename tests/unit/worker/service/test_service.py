"""`omlx-worker service` on launchd and systemd, which are fakes here."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omlx_worker import cli as worker_cli
from omlx_worker.mac import launchd
from omlx_worker.options import read_settings
from omlx_worker.service import cli, systemd
from omlx_worker.settings import WorkerSettings

BEGAN = "Thu Jan 15 08:30:05 2026"


class FakeLaunchd:
    """Holds one agent by what launchd's manual says. A process that is asked to end takes time."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None
        self.ending = 0
        self.status = ""

    def __call__(self, command: Sequence[str]) -> str:
        match list(command):
            case [*_, "ps", "-o", "lstart=", "-p", "4711"]:
                return f"{BEGAN}\n"
            case ["launchctl", "enable", _]:
                return ""
            case ["launchctl", "bootstrap", session, path] if session.startswith("gui/"):
                if self.loaded:
                    raise CalledProcessError(5, command, "", "Bootstrap failed: 5: I/O error\n")
                self.loaded = plistlib.loads(Path(path).read_bytes())
                return ""
            case ["launchctl", "bootout", _] if self.loaded:
                self.ending = 2
                raise CalledProcessError(36, command, "", "Operation now in progress\n")
            case ["launchctl", "print", agent] if self.loaded:
                if self.ending:
                    self.ending -= 1
                    self.loaded = self.loaded if self.ending else None
                return f"{agent} = {{\n\tstate = running\n{self.status}\t\tpid = 1\n}}\n"
        raise CalledProcessError(113, command, "", "Could not find service\n")


class FakeSystemd:
    """Holds one unit's file as it was when systemd last read all units."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = ""
        self.pid = self.status = 0

    def __call__(self, command: Sequence[str]) -> str:
        match list(command):
            case [*_, "ps", "-o", "lstart=", "-p", "4711"]:
                return f"{BEGAN}\n"
            case ["systemctl", "--user", "daemon-reload"]:
                self.read = self.path.read_text() if self.path.exists() else ""
            case ["systemctl", "--user", "restart", systemd.UNIT] if self.read:
                self.pid = 4711
            case ["systemctl", "--user", "disable", "--now", systemd.UNIT] if self.read:
                self.pid = 0
            case ["systemctl", "--user", "show", systemd.UNIT, *_]:
                return f"MainPID={self.pid}\nExecMainStatus={self.status}\n"
        return ""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is empty. Commands are typed in a folder of it."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "REDIS_URL", "OMLX_QUEUE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> FakeLaunchd:
    fake = FakeLaunchd()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cli, "run_command", fake)
    monkeypatch.setattr(launchd.time, "sleep", lambda _: None)
    return fake


@pytest.fixture
def linux(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    fake = FakeSystemd(home / ".config" / "systemd" / "user" / systemd.UNIT)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cli, "run_command", fake)
    return fake


def service(*arguments: str) -> Result:
    result = CliRunner().invoke(
        worker_cli.main, ["service", *arguments], prog_name="omlx-worker", catch_exceptions=False
    )
    assert result.stderr.count("\n") <= 1
    return result


def settings_file(home: Path) -> Path:
    [found] = home.rglob("service/.env")
    return found


def started_settings(home: Path, program: Sequence[str]) -> WorkerSettings:
    """What the program has for settings in the folder of the service."""
    assert program[1:4] == ["-m", "omlx_worker", "run"]
    options = dict(zip(program[4::2], program[5::2], strict=True))
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    return WorkerSettings(_env_file=settings_file(home), **given)  # type: ignore[call-arg]


def test_a_mac_gets_an_agent_that_starts_at_login_and_again_when_it_fails(
    mac: FakeLaunchd, home: Path
) -> None:
    assert service("install", "-m", "demo", "--drain-timeout", "99.5").exit_code == 0
    assert mac.loaded is not None
    assert (home / "Library/LaunchAgents" / f"{mac.loaded['Label']}.plist").exists()
    assert mac.loaded["RunAtLoad"]
    assert mac.loaded["KeepAlive"] == {"SuccessfulExit": False}
    assert mac.loaded["ThrottleInterval"] >= 10
    assert mac.loaded["ExitTimeOut"] > 99.5
    assert mac.loaded["WorkingDirectory"] == str(settings_file(home).parent)
    settings = started_settings(home, mac.loaded["ProgramArguments"])
    assert str(settings.log_file) == mac.loaded["StandardErrorPath"]
    assert (settings.model, settings.drain_timeout) == ("demo", 99.5)


def test_linux_gets_a_unit_of_the_user(linux: FakeSystemd, home: Path) -> None:
    assert service("install", "-m", "demo").exit_code == 0
    for line in ("Restart=on-failure", "KillMode=mixed", "WantedBy=default.target"):
        assert line in linux.read.splitlines()
    [command] = [line for line in linux.read.splitlines() if line.startswith("ExecStart=")]
    program = command.removeprefix("ExecStart=").strip('"').split('" "')
    assert started_settings(home, program).model == "demo"


HARD = ("--redis-url", r"redis://:pa'ss\w\' #1@host:6379/0", "--name", "a.b")


@pytest.mark.usefixtures("linux")
def test_the_service_has_the_settings_that_run_would_have_here(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".env").write_text("OMLX_QUEUE_MAX_BATCH=3\n")
    monkeypatch.setenv("OMLX_QUEUE_PREFIX_CACHE", "2GB")
    options = {"model": "a/b", "redis_url": HARD[1], "name": "a.b", "lookup": False}
    here, _ = read_settings(options)
    assert service("install", "-m", "a/b", *HARD, "--no-lookup").exit_code == 0
    monkeypatch.delenv("OMLX_QUEUE_PREFIX_CACHE")
    assert WorkerSettings(_env_file=settings_file(home)) == here  # type: ignore[call-arg]


@pytest.mark.usefixtures("linux")
def test_a_folder_is_found_from_the_service_too(home: Path) -> None:
    Path("model").mkdir()
    service("install", "-m", "model", "--redis-dir", "../data", "--draft-model", "org/name")
    settings = WorkerSettings(_env_file=settings_file(home))  # type: ignore[call-arg]
    assert settings.model == str(home / "here" / "model")
    assert settings.redis_dir.resolve() == home / "data"
    assert settings.draft_model == "org/name"


@pytest.mark.usefixtures("linux")
def test_the_server_of_this_shell_is_the_services(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    service("install", "-m", "demo")
    monkeypatch.delenv("REDIS_URL")
    settings = WorkerSettings(_env_file=settings_file(home))  # type: ignore[call-arg]
    assert settings.redis_url == "redis://elsewhere:1/0"


@pytest.mark.parametrize("system", ["mac", "linux"])
def test_programs_and_caches_of_this_shell_are_the_services_and_nobody_else_reads_them(
    system: str, home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(system)
    monkeypatch.setenv("HF_TOKEN", 'se"cr%t')
    monkeypatch.setenv("UNRELATED", "x")
    service("install", "-m", "demo")
    files = [path for path in home.rglob("*") if path.is_file()]
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    written = next(path for path in files if path.name != ".env").read_text()
    assert ('"HF_TOKEN=se\\"cr%%t"' if system == "linux" else 'se"cr%t') in written
    assert "UNRELATED" not in written


def test_settings_that_the_user_edits_hold_from_the_next_install(
    linux: FakeSystemd, home: Path
) -> None:
    service("install", "-m", "demo", "--max-batch", "4")
    edited = settings_file(home).read_text().replace("'4'", "8") + "# mine\n"
    settings_file(home).write_text(edited)
    linux.pid = 0
    assert service("install").exit_code == 0
    assert linux.pid
    assert settings_file(home).read_text() == edited
    settings_file(home).write_text(edited.replace("8", "0"))
    result = service("install")
    assert result.exit_code == 2
    said = f"{settings_file(home)}: OMLX_QUEUE_MAX_BATCH: got 0; give a whole number from 1 to 1024"
    assert result.stderr == f"omlx-worker: {said}\n"


@pytest.mark.usefixtures("linux")
def test_a_service_without_a_model_is_refused_and_nothing_is_written(home: Path) -> None:
    result = service("install", "--max-batch", "4")
    assert result.exit_code == 2
    assert "--model: missing; name the model" in result.stderr
    assert [path.name for path in home.rglob("*")] == ["here"]


def test_an_agent_that_runs_has_ended_before_the_next_is_loaded(mac: FakeLaunchd) -> None:
    service("install", "-m", "demo")
    assert service("install", "-m", "a/b").exit_code == 0
    assert mac.loaded is not None


@pytest.mark.parametrize("system", ["mac", "linux"])
def test_the_status_says_since_when_it_runs_and_where_its_files_are(
    system: str, home: Path, request: pytest.FixtureRequest
) -> None:
    fake = request.getfixturevalue(system)
    service("install", "-m", "org/name")
    fake.status, fake.pid = "\tpid = 4711\n" if system == "mac" else 0, 4711
    result = service("status")
    assert result.exit_code == 0
    told = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    since = datetime(2026, 1, 15, 8, 30, 5).astimezone()
    assert told["state"] == f"runs since {since:%Y-%m-%d %H:%M:%S %Z}, process 4711"
    assert told["model"] == "org/name"
    assert told["settings"] == str(settings_file(home))
    assert "worker.log" in told["log"]
    assert Path(told["service"]).exists()


@pytest.mark.parametrize("system", ["mac", "linux"])
def test_a_service_that_failed_says_so(system: str, request: pytest.FixtureRequest) -> None:
    fake = request.getfixturevalue(system)
    service("install", "-m", "demo")
    fake.status, fake.pid = "\tlast exit code = 78: EX_CONFIG\n" if system == "mac" else 78, 0
    result = service("status")
    assert result.exit_code == 1
    assert "not running; ended with status 78, the log says why" in result.stdout


@pytest.mark.parametrize("system", ["mac", "linux"])
def test_uninstall_leaves_settings_and_log(
    system: str, home: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(system)
    service("install", "-m", "demo")
    result = service("uninstall")
    assert str(settings_file(home).parent) in result.stdout
    for command in ("status", "uninstall"):
        again = service(command)
        assert again.exit_code == 2
        assert "no service is installed; do it with: omlx-worker service install" in again.stderr


def refuse(command: Sequence[str]) -> str:
    raise CalledProcessError(1, command, "", "No session\nfor you\n")


@pytest.mark.parametrize(
    ("system", "run", "said"),
    [
        ("mac", refuse, "No session\\x0afor you; log in at the Mac's screen"),
        ("linux", refuse, "daemon-reload: No session\\x0afor you; log in as this user"),
        ("linux", None, "systemctl: No such file or directory; use omlx-worker run"),
    ],
)
def test_a_system_that_refuses_is_one_sentence(
    system: str,
    run: Callable[[Sequence[str]], str] | None,
    said: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = cli.run_command
    request.getfixturevalue(system)
    monkeypatch.setattr(cli, "run_command", run or real)
    if run is None:
        monkeypatch.setenv("PATH", "/nowhere")
    result = service("install", "-m", "demo")
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.usefixtures("linux")
def test_logs_print_the_last_lines(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = service("logs")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "worker.log: not there; start the service with" in result.stderr
    folder = home / ".local" / "share" / "omlx-queue" / "service"
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text("one\ntwo\nthree\n")
    assert service("logs", "-n", "2").exit_code == 0
    assert capfd.readouterr().out == "two\nthree\n"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.usefixtures("linux")
def test_systemd_finds_no_fault_in_the_unit(
    home: Path, linux: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "with space 100%"))
    monkeypatch.setenv("HF_HOME", 'a "b" \\ $HOME %h')
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    service("install", "-m", "demo")
    verify = ["systemd-analyze", "--user", "--man=no", "verify", str(linux.path)]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stderr
    assert systemd.UNIT not in verified.stderr
