"""``omlx-worker run --http``: one command serves a model over HTTP."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from click.testing import CliRunner
from openai import OpenAI
from redis import Redis

from omlx_worker import cli, options
from omlx_worker.ports import serve_http
from omlx_worker.queue.embedded import free_port
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.metrics import Scrape, scrape, value
from tests.helpers.workers import ALIAS, loads, running_worker, wait_for


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(autouse=True)
def _child_finds_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_the_gateway_serves_the_workers_redis_until_the_worker_ends(
    redis_url: str, connection: Redis
) -> None:
    port = free_port()
    settings = WorkerSettings(model="demo", model_alias=ALIAS)
    with running_worker(redis_url), serve_http(port, settings, redis_url) as gateway:
        wait_for(lambda: answers(port) and connection.exists("omlx:models"))
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.completions.create(model=ALIAS, prompt="hi")
        assert answer.choices[0].text
        arguments = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(gateway.pid)], capture_output=True, text=True
        ).stdout
        assert "omlx-gateway" in arguments
        assert redis_url not in arguments, "others may see them"
    assert gateway.code is not None
    assert not answers(port)


def test_the_gateway_ends_with_a_worker_that_is_killed(redis_url: str) -> None:
    port = free_port()
    code = (
        "import sys, time; from omlx_worker.ports import serve_http;"
        "from omlx_worker.settings import WorkerSettings\n"
        "settings = WorkerSettings(model='demo')\n"
        "with serve_http(int(sys.argv[1]), settings, sys.argv[2]): time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(port), redis_url]) as worker:
        wait_for(lambda: answers(port))
        worker.kill()
    wait_for(lambda: not answers(port))


def test_a_gateway_that_ends_by_itself_is_told(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_http(free_port(), WorkerSettings(model="demo"), redis_url) as gateway:
        os.kill(gateway.pid, signal.SIGKILL)
        wait_for(lambda: "serves no HTTP until it is restarted" in caplog.text)


def test_the_command_serves_http_while_the_model_is_loaded(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port, seen = free_port(), list[Any]()

    def load(*_: object) -> FakeEngine:
        (metrics,) = re.findall(r"metrics are at http://127.0.0.1:(\d+)/", caplog.text)
        scrape(metrics)
        seen.append(wait_for(lambda: answers(port)))
        # A request is counted after its answer.
        found = wait_for(lambda: counted(scrape(metrics)))
        seen.append(value(found, "http_requests_total", handler="health", status="200"))
        seen.append(value(found, "http_requests_in_progress"))
        return FakeEngine()

    def counted(found: Scrape) -> Scrape | None:
        return found if any(name == "omlx_http_requests_total" for name, _ in found) else None

    loads(monkeypatch, load)
    arguments = ["run", "-m", "fake", "--redis-url", redis_url, f"--http={port}", "--burst"]
    result = CliRunner().invoke(cli.main, [*arguments, "--metrics-port=0"])
    assert result.exit_code == 0, result.output
    assert seen == [True, 1, 0]
    assert f"(--mode auto); the page is at http://127.0.0.1:{port}/\n" in caplog.text
    assert not answers(port)


def test_a_port_that_is_taken_is_one_sentence(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, lambda *_: FakeEngine())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["run", "-m", "fake", "--redis-url", redis_url, "--http", port]
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert f"--http {port}: nothing can be served there (Address already in use)" in result.stderr


def test_without_the_packages_of_the_gateway_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = options.find_spec
    monkeypatch.setattr(
        options, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    result = CliRunner().invoke(cli.main, ["run", "-m", "fake", "--http", "8000"])
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "uvicorn is not installed; install it with: pip install 'omlx-queue[worker,gateway]'\n"
    )


@pytest.mark.parametrize("port", ["0", "65536", "web"])
def test_a_wrong_port_is_named(port: str) -> None:
    result = CliRunner().invoke(cli.main, ["run", "-m", "fake", f"--http={port}"])
    assert result.exit_code == 2
    assert f"--http: got {port}; give a whole number from 1 to 65535" in result.stderr
