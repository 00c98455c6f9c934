"""The dashboard of docker-compose.yml, with its own packages, shows our jobs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from redis import Redis

from omlx_worker.queue.embedded import free_port
from tests.helpers.compose import dashboard_command, pinned_packages
from tests.helpers.environments import install
from tests.helpers.workers import enqueue, run_burst, status, wait_for


@contextlib.contextmanager
def dashboard(programs: Path, url: str) -> Iterator[str]:
    program, *arguments = dashboard_command()
    arguments[arguments.index("--redis-url") + 1] = url
    port = free_port()
    place = ["--bind", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([programs / program, *arguments, *place])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except urllib.error.URLError:
        return False


def test_the_dashboard_shows_a_finished_job(
    tmp_path: Path, redis_url: str, connection: Redis
) -> None:
    programs = install(tmp_path / "venv", *pinned_packages())
    job = enqueue(connection)
    run_burst(redis_url)
    assert status(job) == "finished"
    with dashboard(programs, redis_url) as url:
        wait_for(lambda: answers(url))
        assert answers(f"{url}/0/view/job/{job.id}")
        with urllib.request.urlopen(f"{url}/0/data/job/{job.id}.json") as response:
            shown = json.load(response)
    assert shown["status"] == "finished"
    assert job.return_value()["choices"][0]["text"] in json.dumps(shown)
