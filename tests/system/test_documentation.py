"""The commands and the Python of the documentation run as printed, in ``examples/data``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from omlx_worker.queue.embedded import free_port
from tests.helpers.documentation import (
    ENDLESS,
    FRAGMENTS,
    IN_THE_BACKGROUND,
    NOT_RUN,
    PAGES,
    PRINTED_REDIS,
    PRINTED_URL,
    ROOT,
    blocks_of,
    commands_of,
    first_line,
    is_typed,
)
from tests.helpers.gateway import is_healthy
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

pytestmark = pytest.mark.timeout(900)

FEW_ROWS, FEW_REQUESTS = 100, 5
TIMED_OUT = 124


@dataclass(frozen=True)
class Place:
    """Where a reader types: a shell's environment, the server in it, and a port that is free."""

    environment: dict[str, str]
    redis_url: str
    port: int

    def here(self, text: str) -> str:
        """What is printed, with this place's addresses."""
        url = f"http://127.0.0.1:{self.port}"
        port = f"--port {self.port}"
        return (
            text.replace(PRINTED_URL, url)
            .replace("--port 8000", port)
            .replace(PRINTED_REDIS, self.redis_url)
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of ``examples/data``, the longest of them cut."""
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    for name, lines in (("releases-500.csv", 1 + FEW_ROWS), ("requests.jsonl", FEW_REQUESTS)):
        long = tmp_path / "data" / name
        long.write_text("".join(long.read_text().splitlines(keepends=True)[:lines]))
    return tmp_path / "data"


@contextmanager
def a_place(home: Path) -> Iterator[Place]:
    """For a user who has a Redis server, and nothing in his home."""
    programs = Path(sys.executable).parent
    with redis_server() as server:
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(home),
            "LLM_USER_PATH": str(home),
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "OMLX_QUEUE_REDIS_URL": server.url,
            "RQ_REDIS_URL": server.url,
            "MLX_DISABLE_COMPILE": "1",
        }
        place = Place(environment, server.url, free_port())
        [models] = blocks_of(PAGES["docs/http.md"], "yaml")
        (home / "extra-openai-models.yaml").write_text(place.here(models))
        yield place


@pytest.fixture
def place(folder: Path) -> Iterator[Place]:
    with a_place(folder) as place:
        yield place


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place with a worker and a gateway."""
    home = tmp_path_factory.mktemp("home")
    with a_place(home) as place, worker(home, place, "--http", str(place.port)) as process:
        wait_for(lambda: is_healthy(place.port, process), 120)
        yield place


@contextmanager
def worker(folder: Path, place: Place, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the demo model."""
    with (folder / "worker.log").open("w") as log:
        command = ["omlx-worker", "run", "-m", "demo", "--name", "documented", *options]
        process = subprocess.Popen(command, cwd=folder, env=place.environment, stderr=log)
    try:
        subprocess.run(["bash", "-c", UNTIL_SERVED], env=place.environment, check=True, timeout=120)
        yield process
    finally:
        process.terminate()
        process.wait()


UNTIL_SERVED = "until omlx-submit models 2>/dev/null | grep -q demo; do sleep 1; done"


def typed(command: str) -> str:
    """What is typed for a printed command."""
    if command in IN_THE_BACKGROUND:
        return IN_THE_BACKGROUND[command]
    if command in ENDLESS:
        return f"timeout --signal=INT --kill-after=30 12 {command}; [ $? = {TIMED_OUT} ]"
    return command


TYPED = {page: list(filter(is_typed, commands_of(path))) for page, path in PAGES.items()}


@pytest.mark.parametrize("page", [page for page, commands in TYPED.items() if commands])
def test_the_commands_of_a_page_run_as_printed(page: str, folder: Path, place: Place) -> None:
    commands = TYPED[page]
    script = "".join(f'{typed(command)}\necho "=== $?" >&3; echo\n' for command in commands)
    with worker(folder, place), (folder / "codes").open("w") as codes:
        shell = subprocess.Popen(
            ["bash", "-c", f"exec 3>&1 >output.txt 2>&1\n{place.here(script)}"],
            cwd=folder,
            env=place.environment,
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
    for line in output.splitlines():
        assert not line.startswith('{"') or json.loads(line)
    if page == "docs/tutorial.md":
        assert f"{FEW_ROWS + 1} table.csv\n" in output
        assert f" of {FEW_ROWS} rows are right" in output
    if page == "docs/http.md":
        assert output.count('"changed":true') == 2


def needs(block: str) -> set[str]:
    """The packages that a block imports."""
    names = re.findall(r"^(?:from|import) (\w+)", block, flags=re.MULTILINE)
    return set(names) - sys.stdlib_module_names


def python_with(names: set[str]) -> Path:
    """A Python that has some packages; the test is skipped without one."""
    code = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {sorted(names)})))"
    ours = {"PYTHONPATH": str(ROOT / "producer")}
    for python in (sys.executable, os.environ.get("CLIENTS_PYTHON", sys.executable)):
        if subprocess.run([python, "-c", code], env=os.environ | ours, check=False).returncode == 0:
            return Path(python)
    pytest.skip(f"set CLIENTS_PYTHON to a Python with {', '.join(sorted(names))}")


BLOCKS = {
    " ".join([page, str(number), *sorted(needs(block))]): block
    for page, path in PAGES.items()
    for number, block in enumerate(blocks_of(path, "python"))
    if first_line(block) not in NOT_RUN
}
OF_BATCHES = [name for name, block in BLOCKS.items() if "completion_window" in block]


def run_block(block: str, place: Place, folder: Path) -> str:
    """What a block prints, after the lines that a fragment lacks."""
    block = FRAGMENTS.get(first_line(block), "") + block
    python = python_with(needs(block))
    done = subprocess.run(
        [python, "-c", place.here(block)],
        cwd=folder,
        env=place.environment | {"PYTHONPATH": str(ROOT / "producer"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", BLOCKS)
def test_the_python_of_a_page_runs_as_printed(name: str, served: Place, folder: Path) -> None:
    told = run_block(BLOCKS[name], served, folder)
    if "print(" in BLOCKS[name]:
        assert told.strip()
    if "Ann is 30" in BLOCKS[name]:
        assert re.search(r"name='.*' age=\d+", told), told
    if name in OF_BATCHES:
        assert "completed None\n" in told
        assert told.count('"custom_id"') == FEW_REQUESTS


@pytest.mark.parametrize("name", OF_BATCHES)
def test_the_python_of_a_batch_tells_which_line_is_wrong(
    name: str, served: Place, folder: Path
) -> None:
    with (folder / "requests.jsonl").open("a") as rows:
        rows.write("{}\n")
    told = run_block(BLOCKS[name], served, folder)
    assert "failed Errors(" in told
    assert f"line {FEW_REQUESTS + 1}: " in told
