"""The wheel and the source distribution hold all that a worker and a producer need."""

from __future__ import annotations

import contextlib
import email
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

from tests.helpers.environments import install

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
FOLDERS = {"omlx_producer": ROOT / "producer", "omlx_worker": ROOT / "worker"}
PROJECT = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
VERSION = PROJECT["version"]
LICENCES = {Path(name) for name in PROJECT["license-files"]}
WHEEL, SOURCE = f"omlx_queue-{VERSION}-py3-none-any.whl", f"omlx_queue-{VERSION}.tar.gz"
INFO = f"omlx_queue-{VERSION}.dist-info"
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # The builders replace the arguments.
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both, built from a copy without what earlier builds left behind."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS.values():
        shutil.copytree(folder, copy / folder.name, ignore=leftovers)
    command = [sys.executable, "-c", BUILD, built]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    return built


def files_of_the_packages() -> set[Path]:
    """The paths of all files that are installed, as imports see them."""
    return {
        path.relative_to(folder)
        for name, folder in FOLDERS.items()
        for path in (folder / name).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def test_the_wheel_holds_every_file_of_the_packages(artefacts: Path) -> None:
    with zipfile.ZipFile(artefacts / WHEEL) as wheel:
        names = {Path(name) for name in wheel.namelist()}
        metadata = email.message_from_bytes(wheel.read(f"{INFO}/METADATA"))
    assert names >= files_of_the_packages() | {Path(INFO, "licenses", name) for name in LICENCES}
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == PROJECT["license"]


def test_the_source_distribution_holds_every_file_of_the_packages(artefacts: Path) -> None:
    with tarfile.open(artefacts / SOURCE) as source:
        names = {Path(*Path(name).parts[1:]) for name in source.getnames()}
    packages = {Path(FOLDERS[path.parts[0]].name, path) for path in files_of_the_packages()}
    assert names >= packages | LICENCES | {Path("README.md"), Path("pyproject.toml")}


@contextlib.contextmanager
def worker(program: Path, empty: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A worker of the demo model; gives the URL of its own Redis server."""
    options = ["-m", "demo", "--embedded-redis", "--redis-dir", str(empty / "redis")]
    log = empty / "log"
    with log.open("w") as stderr:
        command = [program, "run", *options]
        process = subprocess.Popen(command, cwd=empty, env=environment, stderr=stderr)
    try:
        while "is ready: worker" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield log.read_text().partition("Redis is at ")[2].split()[0]
    finally:
        process.terminate()
        code = process.wait(90)
    assert code == 0, log.read_text()


def test_a_worker_installed_from_either_runs_a_job_from_an_empty_folder(
    artefacts: Path, tmp_path: Path
) -> None:
    programs = install(tmp_path / "venv", f"{artefacts / WHEEL}[worker]")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    empty = tmp_path / "empty"
    empty.mkdir()

    def output(program: str, *arguments: str) -> str:
        command = [programs / program, *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_a_job() -> None:
        for program in ("omlx-worker", "omlx-submit"):
            assert output(program, "--version") == f"{program}, version {VERSION}\n"
        with worker(programs / "omlx-worker", empty, environment) as url:
            options = ["--redis-url", url, "-m", "demo", "--queue-anyway"]
            assert output("omlx-submit", *options, "def fibonacci(n):").strip()

    run_a_job()
    assert "8 texts streamed" in output("omlx-worker", "demo", "--max-tokens", "16")
    # The dependencies are there already.
    output("pip", "uninstall", "--quiet", "--yes", "omlx-queue")
    output("pip", "install", "--quiet", "--no-deps", str(artefacts / SOURCE))
    run_a_job()
