"""A worker that loads its model says so at every door, and takes no job until it serves."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner, Result
from redis import Redis

from omlx_producer import Producer
from omlx_producer.cli.main import cli
from omlx_producer.client import workers
from omlx_producer.client.workers import read_workers
from omlx_producer.metrics import QueueCollector, metrics_server
from omlx_producer.wire import ModelInfo
from omlx_producer.wire.keys import MODELS_KEY
from omlx_worker.control import status as board
from omlx_worker.settings import WorkerSettings
from tests.helpers.bulk_runs import write_rows
from tests.helpers.gateway import running_gateway
from tests.helpers.metrics import scrape, value
from tests.helpers.turning import Loads, describe, loading_worker, turning_worker
from tests.helpers.workers import fetch, is_over, running_worker, status, wait_for

Run = Callable[..., Result]
TOLD = "loading it (warming up 3 of 57)"
HELD_UP = f"the workers of demo are {TOLD}"


@pytest.fixture
def run(redis_url: str) -> Run:
    environment = {"OMLX_QUEUE_REDIS_URL": redis_url}
    return lambda *args: CliRunner(env=environment).invoke(cli, args, prog_name="omlx-submit")


@pytest.fixture
def loads() -> Loads:
    """Loads that last until their gate is set."""
    loads = Loads()
    loads.progress = "warming up 3 of 57"
    loads.gate.clear()
    return loads


@pytest.fixture
def loading(redis_url: str, connection: Redis, loads: Loads) -> Iterator[None]:
    """A worker that loads demo, its only model."""
    with loading_worker(redis_url, loads, name="mac-1"):
        wait_for(lambda: any(each.progress for each in read_workers(connection, "demo")))
        yield
        loads.gate.set()


@pytest.mark.usefixtures("loading")
def test_the_command_the_page_and_the_metrics_tell_what_a_worker_loads(
    run: Run, redis_url: str, connection: Redis
) -> None:
    shown = run("status").stdout
    assert ["mac-1", "loading"] in [line.split()[:2] for line in shown.splitlines()]
    assert f"mac-1: {TOLD}" in shown
    found = json.loads(run("status", "--json").stdout)
    [worker] = found["workers"]
    assert (worker["state"], worker["progress"]) == ("loading", "warming up 3 of 57")
    with running_gateway(redis_url) as url:
        [model] = httpx2.get(f"{url}/status").json()["models"]
    assert (model["held_up"], model["notes"]) == (HELD_UP, [f"mac-1: {TOLD}"])
    assert model["table"][0]["state"] == "loading"
    with metrics_server("127.0.0.1", 0, QueueCollector(connection)) as port:
        scraped = scrape(port)
    told = [value(scraped, name, model_name="demo") for name in ("workers", "workers_loading")]
    assert told == [1, 1]


@pytest.mark.usefixtures("loading")
def test_a_job_waits_for_the_worker_that_loads_and_is_told_so(
    run: Run, connection: Redis, loads: Loads
) -> None:
    job = fetch(connection, Producer(connection).submit(model="demo", prompt="hello").id)
    assert HELD_UP in run("status", job.id).stdout
    assert status(job) == "queued"
    loads.gate.set()
    wait_for(lambda: is_over(job))
    assert status(job) == "finished"
    assert "loading" not in run("status").stdout


@pytest.mark.usefixtures("loading")
def test_a_dry_run_counts_and_says_that_an_estimate_waits(run: Run, tmp_path: Path) -> None:
    done = run("run", str(write_rows(tmp_path / "rows.jsonl", 3, model="demo")), "--dry-run")
    assert (done.exit_code, json.loads(done.stdout)["rows"]) == (0, 3)
    assert done.stderr == f"{HELD_UP}; an estimate waits for that\n"


@pytest.fixture
def unread(redis_url: str, connection: Redis, loads: Loads) -> Iterator[threading.Event]:
    """A worker of demo, which it announces once this is set: it cannot read its files before."""
    files = threading.Event()

    def read(settings: WorkerSettings) -> ModelInfo:
        files.wait(20)
        return describe(settings)

    with loading_worker(redis_url, loads, describe=read, name="mac-1"):
        try:
            wait_for(lambda: any(each.progress for each in read_workers(connection, "demo")))
            yield files
        finally:
            files.set()
            loads.gate.set()


@pytest.mark.usefixtures("unread")
def test_a_worker_says_that_it_loads_before_it_knows_what(run: Run, tmp_path: Path) -> None:
    shown, told = run("status").stdout, "loading it (reading its configuration)"
    assert ["mac-1", "loading"] in [line.split()[:2] for line in shown.splitlines()]
    assert f"mac-1: {told}" in shown
    held_up = f"the workers of demo are {told}"
    assert run("models").stderr == f"{held_up}\n"
    rows, named = tmp_path / "few.csv", ("--model", "demo")
    rows.write_text("mail\nhello\n")
    command = ("run", str(rows), "--template", "{mail}")
    done = run(*command, "--dry-run")
    assert (done.exit_code, json.loads(done.stdout)["rows"]) == (0, 1)
    assert done.stderr == f"{held_up}; for an estimate, try again in a moment\n"
    again = f"omlx-submit: {held_up}; try again in a moment"
    for options in ((), named):
        refused = run(*command, "-o", str(tmp_path / "out.csv"), *options)
        assert refused.stderr == f"{again}, or pass --queue-anyway\n"
    assert run("hello").stderr == f"{again}\n"
    assert "which no worker has announced" in run("hello", "--model", "asleep").stderr


def test_a_model_is_announced_as_soon_as_its_worker_knows_it(
    connection: Redis, unread: threading.Event
) -> None:
    assert not Producer(connection).models()
    unread.set()
    wait_for(lambda: Producer(connection).models())
    assert read_workers(connection, "demo")[0].is_loading


def test_the_log_says_what_a_worker_loads(
    redis_url: str, loads: Loads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(board, "WRITE_SECONDS", 0.0)
    with caplog.at_level(logging.INFO), loading_worker(redis_url, loads):
        wait_for(lambda: "loading demo: warming up 3 of 57" in caplog.messages)
        loads.gate.set()


def test_a_worker_of_one_model_is_stopped_at_once_while_it_loads(
    redis_url: str, connection: Redis, loads: Loads, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), loading_worker(redis_url, loads) as worker:
        wait_for(lambda: loads.made)
        worker.stop()
        wait_for(lambda: not worker.test_thread.is_alive())
        assert worker.exit_code == 143
        assert "ended before demo was loaded" in caplog.messages
        assert not any("in total" in each or "still busy" in each for each in caplog.messages)
        assert not connection.keys("omlx:workers:*")
        loads.gate.set()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_loads_falls_silent(
    run: Run, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, time; from omlx_worker import build, cli; "
        "build.load_engine = lambda *_: time.sleep(60); cli.main(sys.argv[1:])"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-c", code, "run", "-m", "demo", "--redis-url", redis_url, "--name=mac-1"],
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        wait_for(lambda: read_workers(connection, "demo"), 60)
        assert "mac-1: loading it" in run("status").stdout
        wait_for(lambda: connection.hexists(MODELS_KEY, "demo"), 60)
        process.kill()
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.5)
    wait_for(lambda: not read_workers(connection, "demo"))
    shown = run("status").stdout
    assert "no worker serves demo" in shown
    assert "mac-1 has been silent for" in shown


@pytest.mark.parametrize("models", [["demo"], ["demo", "other"]])
def test_whoever_knows_a_model_finds_its_worker(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch, models: list[str]
) -> None:
    found, announce = [], board.announce

    def announced(told: Redis, alias: str, info: ModelInfo, *, served: bool = True) -> None:
        if served:
            found.append((alias, bool(read_workers(connection, alias))))
        announce(told, alias, info, served=served)

    monkeypatch.setattr(board, "announce", announced)
    one = len(models) == 1
    serving = running_worker(redis_url) if one else turning_worker(redis_url, models, Loads())
    with serving:
        wait_for(lambda: connection.hlen(MODELS_KEY) == len(models))
    assert found
    assert all(has_worker for _, has_worker in found), found
