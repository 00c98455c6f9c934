"""The processes that serve the models of one worker: what they are told, and how they end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from omlx_producer.client.workers import read_workers
from omlx_worker import model_process
from omlx_worker.control.status import Turn
from omlx_worker.model_process import ModelProcess, Order
from omlx_worker.processes import lives
from omlx_worker.settings import WorkerSettings
from tests.helpers.metrics import scrape, value
from tests.helpers.turning import enqueue_for
from tests.helpers.workers import is_over, status, wait_for


def plays(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a program be the process of a model."""
    command = [sys.executable, "-c", f"import os, sys\n{program}"]
    monkeypatch.setattr(model_process, "python_command", lambda *_: command)


def ended(process: ModelProcess) -> int:
    wait_for(lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def test_a_process_gets_all_settings_of_its_model_whatever_variables_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plays(monkeypatch, 'sys.stderr.write("omlx-worker: " + os.environ["OMLX_MODEL_PROCESS"])')
    settings = WorkerSettings(
        **{"model": "demo", "max_batch": 7, "memory_limit": "2GB", "http": 8000},
        **{"embedded_redis": True, "log_file": tmp_path / "log", "metrics_port": 9400},
    )
    turn = Turn(switches=2, switch_seconds=1.5, left_at=3.0)
    process = ModelProcess("redis://u:secret@127.0.0.1:1/0", settings, turn)
    assert ended(process) == 0
    monkeypatch.setenv("OMLX_QUEUE_HTTP", "8001")
    monkeypatch.setenv("OMLX_QUEUE_MAX_BATCH", "9")
    order = Order.model_validate_json(process.sentence)
    told = WorkerSettings(**order.settings)
    # This process serves the ports, runs the server and writes the log.
    assert (told.http, told.embedded_redis, told.log_file) == (None, False, None)
    assert process.metrics_url == f"http://127.0.0.1:{told.metrics_port}/metrics"
    assert (told.max_batch, told.memory_limit, told.alias) == (7, 2_000_000_000, "demo")
    assert (order.url, order.turn) == ("redis://u:secret@127.0.0.1:1/0", turn)


def test_what_a_process_logs_is_logged_here_and_its_sentence_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    line = '{"time": "now", "level": "warning", "message": "hot", "job": "j1"}'
    plays(
        monkeypatch, f"sys.stderr.write({line!r} + '\\nmore\\nomlx-worker: no model\\n')\nexit(2)"
    )
    with caplog.at_level(logging.INFO):
        process = ModelProcess("redis://x", WorkerSettings(model="demo"), Turn())
        assert ended(process) == 2
    assert process.sentence == "no model"
    [record] = caplog.records
    assert (record.levelname, record.message, record.__dict__["job"]) == ("WARNING", "hot", "j1")
    assert capfd.readouterr().err == "more\n"


@contextlib.contextmanager
def command(url: str, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``omlx-worker run`` with the models a and b."""
    models = [each for alias in "ab" for each in ("-m", "demo", "--model-alias", alias)]
    arguments = ["--redis-url", url, "--log-file", str(log), *options, *models]
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [sys.executable, "-m", "omlx_worker", "run", *arguments],
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def child_of(process: subprocess.Popen[bytes]) -> int:
    found = wait_for(
        lambda: (
            subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
            ).stdout
        )
    )
    return int(found)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_turn_and_one_whose_worker_is_killed_ends_too(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    options = ("--name", "mac-1", "--metrics-port", "0", "--lease-seconds", "1")
    with command(redis_url, log, *options) as worker:
        first = enqueue_for(connection, "a", max_completion_tokens=4)
        wait_for(lambda: is_over(first), 60)
        port = log.read_text().partition("metrics are at http://127.0.0.1:")[2].partition("/")[0]
        assert value(scrape(port), "generation_tokens_total", model_name="a") == 4
        other = enqueue_for(connection, "b", max_completion_tokens=4)
        wait_for(lambda: is_over(other), 60)
        assert value(scrape(port), "model_switches_total", model_name="b") == 1
        os.kill(child_of(worker), signal.SIGKILL)
        wait_for(lambda: [each for each in read_workers(connection, "b") if each.fault])
        jobs = [enqueue_for(connection, model, max_completion_tokens=4) for model in "ab"]
        wait_for(lambda: all(map(is_over, jobs)), 60)
        assert {status(job) for job in (first, other, *jobs)} == {"finished"}
        assert "b is not served: its process was killed by signal 9; " in log.read_text()
        child = child_of(worker)
        worker.kill()
        wait_for(lambda: not lives(child))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_worker_in_order(
    redis_url: str, connection: Redis, tmp_path: Path, number: int
) -> None:
    with command(redis_url, tmp_path / "worker.log") as worker:
        job = enqueue_for(connection, "a", max_completion_tokens=4)
        wait_for(lambda: is_over(job), 60)
        worker.send_signal(number)
        assert worker.wait(20) == 0
    assert not connection.keys("omlx:workers:*")
