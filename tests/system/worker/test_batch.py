"""`omlx-worker batch` with the demo model: one command, whatever of it is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from omlx_worker.processes import lives
from omlx_worker.queue.embedded import running_url
from tests.helpers.bulk_runs import count_lines, ids
from tests.helpers.screens import Session
from tests.helpers.workers import wait_for

CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from omlx_worker.cli import main; main(prog_name='omlx-worker')"
)
ROWS = 24


class Commands:
    """Starts commands in one folder with one Redis folder, and kills them all at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = folder / "redis"
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMLX_QUEUE_REDIS_DIR": str(self.redis),
            "OMLX_QUEUE_STATE_DIR": str(folder),
            "OMLX_QUEUE_LEASE_SECONDS": "2",
            "MLX_DISABLE_COMPILE": "1",
            # Where no Redis is.
            "REDIS_URL": "redis://127.0.0.1:1/0",
        }
        self.started: list[subprocess.Popen[str]] = []

    def line(self, source: str, output: str, *more: str) -> list[str]:
        options = ("--raw", "--template", "{call}", "--max-tokens", "40", "--temperature", "0")
        given = ["-m", "demo", source, "-o", output, *options, "--max-batch", "4", *more]
        return [sys.executable, "-c", CODE, "batch", *given]

    def start(self, source: str, output: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.line(source, output, *more),
            cwd=self.folder,
            env=self.env,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, source: str, output: str, *more: str) -> tuple[int, str]:
        process = self.start(source, output, *more)
        _, said = process.communicate(timeout=200)
        return process.returncode, said


def worker_of(process: subprocess.Popen[str]) -> int:
    """The process of the worker that a command has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "omlx_worker.cli"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    rows = "".join(f'{n},"def f{n}(x):"\n' for n in range(ROWS))
    (tmp_path / "rows.csv").write_text(f"id,call\n{rows}")
    commands = Commands(tmp_path)
    yield commands
    for process in commands.started:
        with process:
            process.kill()


def require_whole(folder: Path, output: str) -> None:
    """Each row has one line, in the file of lines and in the table."""
    assert sorted(ids(folder / f"{output}.jsonl"), key=int) == [str(n) for n in range(ROWS)]
    assert count_lines(folder / output) >= ROWS + 1
    assert count_lines(folder / f"{output}.errors.jsonl") == 0


def some_rows(folder: Path, output: str, more: int = 1) -> None:
    """Wait until more rows than there are have ended."""
    path = folder / f"{output}.jsonl"
    before = count_lines(path)
    wait_for(lambda: count_lines(path) >= before + more, 120, "rows that end")


def nothing_runs(commands: Commands, *pids: int) -> bool:
    return running_url(commands.redis) is None and not any(map(lives, pids))


def test_a_csv_becomes_a_table_and_nothing_is_left_running(
    commands: Commands, tmp_path: Path
) -> None:
    process = commands.start("rows.csv", "out.csv")
    some_rows(tmp_path, "out.csv")
    worker = worker_of(process)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert said.startswith('{"type": "loading", "model": "demo"}\n')
    require_whole(tmp_path, "out.csv")
    assert nothing_runs(commands, worker)


def test_ctrl_c_drains_and_the_same_line_goes_on(commands: Commands, tmp_path: Path) -> None:
    line = commands.line("rows.csv", "out.csv", "--max-batch", "2")
    with Session(line, 100, env=commands.env, cwd=tmp_path) as session:
        wait_for(lambda: "loading demo" in repr(session.screen), 60, "the loading model")
        some_rows(tmp_path, "out.csv")
        session.type(b"\x03")
        assert session.wait(200) == 130
        shown = " ".join(session.screen.lines)
    assert "interrupted: " in shown
    assert "continue with: omlx-worker batch -m demo rows.csv -o out.csv" in shown
    assert 0 < count_lines(tmp_path / "out.csv.jsonl") < ROWS
    assert nothing_runs(commands)
    assert commands.finish("rows.csv", "out.csv")[0] == 0
    require_whole(tmp_path, "out.csv")


def test_a_killed_worker_ends_the_command_and_the_same_line_goes_on(
    commands: Commands, tmp_path: Path
) -> None:
    process = commands.start("rows.csv", "out.csv")
    some_rows(tmp_path, "out.csv")
    os.kill(worker_of(process), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith(
        "omlx-worker: the worker was killed by signal 9; its log is "
    )
    assert "; continue with: omlx-worker batch -m demo rows.csv -o out.csv " in said
    assert nothing_runs(commands)
    assert commands.finish("rows.csv", "out.csv")[0] == 0
    require_whole(tmp_path, "out.csv")


def test_a_killed_redis_ends_the_command_and_the_same_line_goes_on(
    commands: Commands, tmp_path: Path
) -> None:
    process = commands.start("rows.csv", "out.csv")
    some_rows(tmp_path, "out.csv")
    with Redis.from_url(running_url(commands.redis) or "") as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "omlx-worker: the embedded Redis server was killed by signal 9; its log is " in said
    assert "; continue with: omlx-worker batch -m demo rows.csv -o out.csv " in said
    assert nothing_runs(commands)
    assert commands.finish("rows.csv", "out.csv")[0] == 0
    require_whole(tmp_path, "out.csv")


def test_a_killed_command_takes_its_redis_and_its_worker_along(
    commands: Commands, tmp_path: Path
) -> None:
    process = commands.start("rows.csv", "out.csv")
    some_rows(tmp_path, "out.csv")
    worker = worker_of(process)
    process.kill()
    wait_for(lambda: nothing_runs(commands, worker), what="the end of Redis and the worker")
    assert commands.finish("rows.csv", "out.csv")[0] == 0
    require_whole(tmp_path, "out.csv")


def test_two_files_share_one_worker(commands: Commands, tmp_path: Path) -> None:
    first = commands.start("rows.csv", "one.csv")
    second = commands.start("rows.csv", "two.csv")
    ends = [process.communicate(timeout=250)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], ends
    assert sum('{"type": "loading"' in said for said in ends) == 1
    assert sum("of this machine serves demo; using it" in said for said in ends) == 1
    require_whole(tmp_path, "one.csv")
    require_whole(tmp_path, "two.csv")
    assert nothing_runs(commands)


def test_a_killed_command_ends_the_other_that_uses_its_worker(
    commands: Commands, tmp_path: Path
) -> None:
    first = commands.start("rows.csv", "one.csv")
    some_rows(tmp_path, "one.csv")
    second = commands.start("rows.csv", "two.csv", "--window", "4")
    some_rows(tmp_path, "two.csv")
    first.kill()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1, said
    # Both end with the first command, one a moment before the other.
    ended = "omlx-worker: the (worker|server) of another command has ended; continue with: "
    assert re.search(ended, said)
    assert commands.finish("rows.csv", "two.csv")[0] == 0
    require_whole(tmp_path, "two.csv")


def test_the_same_line_is_refused_while_it_runs(commands: Commands, tmp_path: Path) -> None:
    process = commands.start("rows.csv", "out.csv")
    some_rows(tmp_path, "out.csv")
    code, said = commands.finish("rows.csv", "out.csv")
    assert code == 2
    assert said.startswith("omlx-worker: out.csv.run: another command is writing it")
    assert process.wait(200) == 0
    require_whole(tmp_path, "out.csv")


def test_an_error_of_the_model_is_the_worker_s_own_sentence(
    commands: Commands, tmp_path: Path
) -> None:
    code, said = commands.finish("rows.csv", "out.csv", "--memory-limit", "1MB")
    assert code == 2
    assert said.splitlines()[1:] == [
        "omlx-worker: --memory-limit: got 977 KiB, but the model's weights alone take 28.8 MiB; "
        "raise it, or take a smaller model"
    ]
    assert not (tmp_path / "out.csv.run").exists()
