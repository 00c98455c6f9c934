"""What Prometheus reads from a gateway, over HTTP."""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import cast

import openai
import pytest
import uvicorn
from click.testing import CliRunner
from openai import OpenAI
from redis import Redis
from starlette.types import ASGIApp

from omlx_gateway.app import create_app
from omlx_gateway.cli import main
from omlx_gateway.metrics import MeasuredApp, serve_metrics
from tests.helpers.gateway import running_gateway
from tests.helpers.metrics import scrape, value
from tests.helpers.workers import ALIAS, running_worker, wait_for


@contextlib.contextmanager
def measured(redis_url: str) -> Iterator[tuple[str, int]]:
    """The URL of a gateway and the port of its metrics."""
    app = MeasuredApp(create_app(redis_url))
    with (
        running_gateway(redis_url, app=app) as url,
        serve_metrics("127.0.0.1", 0, app, redis_url) as port,
    ):
        yield url, port


def asked(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_requests_are_counted_by_handler_and_status(redis_url: str, connection: Redis) -> None:
    with (
        running_worker(redis_url),
        measured(redis_url) as (url, port),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        wait_for(lambda: connection.exists("omlx:models"))
        for _ in range(3):
            client.completions.create(model=ALIAS, prompt="hi")
        list(client.completions.create(model=ALIAS, prompt="hi", stream=True))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="hi")
        assert [asked(f"{url}/{path}") for path in ("made", "up")] == [404, 404]
        found = wait_for(lambda: (s := scrape(port)) and value(s, "http_requests_total") == 7 and s)
    done = {
        (status, handler): value(found, "http_requests_total", status=status, handler=handler)
        for status, handler in (("200", "text"), ("404", "text"), ("404", "none"))
    }
    assert done == {("200", "text"): 4, ("404", "text"): 1, ("404", "none"): 2}
    assert value(found, "http_request_duration_seconds_count", handler="text") == 5
    assert value(found, "http_requests_in_progress") == 0
    assert value(found, "workers", model_name=ALIAS) == value(found, "redis_up") == 1


def test_a_stream_is_open_until_its_end(redis_url: str, connection: Redis) -> None:
    with (
        running_worker(redis_url, step_seconds=0.01),
        measured(redis_url) as (url, port),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        wait_for(lambda: connection.exists("omlx:models"))
        with client.completions.create(
            model=ALIAS, prompt="hi", stream=True, max_tokens=9_000
        ) as stream:
            next(iter(stream))
            assert value(scrape(port), "http_requests_in_progress") == 1
        wait_for(lambda: value(scrape(port), "http_requests_in_progress") == 0)


def test_the_command_serves_metrics_beside_the_interface(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def serve(server: uvicorn.Server, _: list[socket.socket]) -> None:
        monkeypatch.undo()
        (port,) = re.findall(r"metrics are at http://127.0.0.1:(\d+)/", capfd.readouterr().err)
        with running_gateway(redis_url, app=cast(ASGIApp, server.config.app)) as url:
            assert asked(f"{url}/health") == 200
            assert asked(f"{url}/metrics") == 404, "the interface itself serves none"
            wait_for(lambda: value(scrape(int(port)), "http_requests_total") == 2)
            seen.append(url)

    monkeypatch.setattr("uvicorn.Server.run", serve)
    arguments = ["--redis-url", redis_url, "--port", "0", "--metrics-port", "0"]
    main(arguments, standalone_mode=False)
    assert seen


def test_a_port_that_is_taken_is_one_sentence(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["--redis-url", redis_url, "--metrics-port", port])
    assert result.exit_code == 2
    assert f"--metrics-port {port}: nothing can be served there (Address already in use)" in (
        result.stderr
    )
