"""Where Redis is, and what of its URL may be shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner

from omlx_gateway.cli import main as gateway
from omlx_producer import AsyncProducer, AsyncTokenStream, OmlxQueueError, Producer, TokenStream
from omlx_producer.cli.main import cli
from omlx_producer.connection import DEFAULT_REDIS_URL, redis_url, without_password
from omlx_producer.environment import DOTENV
from omlx_worker.cli import main as worker


@pytest.fixture(autouse=True)
def _no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMLX_QUEUE_REDIS_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)


def test_the_nearest_url_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_url() == DEFAULT_REDIS_URL
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert redis_url() == "redis://b"
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "redis://a")
    assert redis_url() == "redis://a"
    assert redis_url("redis://given") == "redis://given"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "")
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert redis_url() == "redis://b"


def test_the_environment_wins_over_the_file_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("OMLX_QUEUE_REDIS_URL=redis://a\nDATABASE_URL=foreign\n")
    assert redis_url(None, DOTENV) == "redis://a"
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "redis://b")
    assert redis_url(None, DOTENV) == "redis://b"


def test_the_variable_of_this_program_wins_over_the_general_one_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path(".env").write_text("REDIS_URL=redis://c\n")
    assert redis_url(None, DOTENV) == "redis://c"
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert redis_url(None, DOTENV) == "redis://b"
    Path(".env").write_text("OMLX_QUEUE_REDIS_URL=redis://a\n")
    assert redis_url(None, DOTENV) == "redis://a"


async def test_the_file_of_the_folder_sends_no_producer_elsewhere() -> None:
    Path(".env").write_text("OMLX_QUEUE_REDIS_URL=redis://elsewhere\nREDIS_URL=redis://there\n")
    with Producer() as producer:
        assert producer.connection.get_connection_kwargs()["host"] == "127.0.0.1"
    async with AsyncProducer() as other:
        assert other._connection.get_connection_kwargs()["host"] == "127.0.0.1"


@pytest.mark.parametrize("command", [["models"], ["x", "-m", "demo", "--queue-anyway"]])
def test_the_file_of_the_folder_is_read_by_commands(command: list[str]) -> None:
    Path(".env").write_text("OMLX_QUEUE_REDIS_URL=redis://127.0.0.1:1/7\n")
    done = CliRunner().invoke(cli, command)
    assert (done.exit_code, "Redis at redis://127.0.0.1:1/7 " in done.stderr) == (3, True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/0", "redis://host:1/0"),
        ("rediss://me:sec@ret@host/0", "rediss://host/0"),
        ("redis://host/0?password=secret&username=me", "redis://host/0"),
        ("unix:///tmp/redis.sock?password=secret", "unix:///tmp/redis.sock"),
        ("unix://me@/tmp/a@b.sock", "unix:///tmp/a@b.sock"),
        ("redis://host/0?password=s@cret", "redis://host/0"),
        *((f"redis://me:12{mark}cret@host/0", "***") for mark in "/?#["),
        ("redis://me:s/e?c=r&e#t@host/0", "***"),
        ("rediss://me/12@host/0", "***"),
        ("unix://me:12/cret@/tmp/redis.sock", "***"),
        ("me:secret@host:6379", "***"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize("mark", "/?#")
def test_a_password_that_would_end_the_host_is_refused_before_any_part_of_it_is_looked_up(
    kind: Any, mark: str
) -> None:
    with pytest.raises(OmlxQueueError) as caught:
        kind(f"redis://me:12{mark}cret@host:6379/0")
    assert str(caught.value) == (
        "connection: has an @ behind a /, ? or #; in a password write %40, %2F, %3F and %23 for "
        "them"
    )


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://host:26379/mymaster", "Redis Sentinel is not supported; give the URL"),
        ("redis://host/0?service_name=mymaster", "has an option behind its ? that redis-py does"),
    ],
)
def test_a_url_of_sentinel_is_refused_in_one_sentence(kind: Any, url: str, said: str) -> None:
    with pytest.raises(OmlxQueueError) as caught:
        kind(url)
    assert str(caught.value).startswith(f"connection: {said}")


def test_a_variable_that_is_neither_true_nor_false_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_QUEUE_ALLOW_EVICTION", "maybe")
    said = "OMLX_QUEUE_ALLOW_EVICTION: got 'maybe'; give true or false"
    with pytest.raises(OmlxQueueError, match=f"^{said}$"):
        Producer()
    for program, arguments in ((cli, ["models"]), (gateway, ["--port", "0"])):
        done = CliRunner().invoke(program, arguments)
        assert (done.exit_code, done.stderr.endswith(f": {said}\n")) == (2, True), done.stderr


async def test_a_producer_without_a_url_takes_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "redis://a:1234/5")
    with Producer() as producer:
        kwargs = producer.connection.get_connection_kwargs()
    assert (kwargs["host"], kwargs["port"], kwargs["db"]) == ("a", 1234, 5)
    async with AsyncProducer() as other:
        kwargs = other._connection.get_connection_kwargs()
    assert (kwargs["host"], kwargs["port"], kwargs["db"]) == ("a", 1234, 5)


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("localhost:6379", "got 'localhost:6379', "),
        ("http://host", "got 'http://host', "),
        ("''", "got \"''\", "),
        ("redis://host:secret", ""),
        ("redis://:secret", ""),
    ],
)
def test_a_url_that_is_none_is_an_error_of_this_package(kind: Any, url: str, got: str) -> None:
    with pytest.raises(OmlxQueueError) as caught:
        kind(url)
    assert str(caught.value) == (
        f"connection: {got}not the URL of a Redis server; give one such as redis://127.0.0.1:6379/0"
    )


@pytest.mark.parametrize("kind", [Producer, AsyncProducer, partial(TokenStream, job_id="job")])
def test_blanks_and_quotes_around_a_url_do_not_count(kind: Any) -> None:
    made = kind(" 'redis://a:1234/5' ")
    client = made.connection if isinstance(made, Producer) else made._connection
    kwargs = client.get_connection_kwargs()
    assert (kwargs["host"], kwargs["port"], kwargs["db"]) == ("a", 1234, 5)


@pytest.mark.parametrize(
    ("program", "arguments"), [(cli, ["models"]), (gateway, ["--port", "0"]), (worker, ["run"])]
)
def test_a_wrong_url_is_told_with_what_has_set_it(
    monkeypatch: pytest.MonkeyPatch, program: click.Group, arguments: list[str]
) -> None:
    def said(*more: str) -> str:
        if program is worker:
            more = (*more, "-m", "demo")
        done = CliRunner().invoke(program, [*arguments, *more])
        assert done.exit_code == 2, done.output
        return done.stderr.partition(": ")[2]

    remedy = "not the URL of a Redis server; give one such as redis://127.0.0.1:6379/0\n"
    monkeypatch.setenv("REDIS_URL", "zz")
    assert said() == f"REDIS_URL: got 'zz', {remedy}"
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "redis://host:zz")
    assert said() == f"OMLX_QUEUE_REDIS_URL: {remedy}"
    assert said("--redis-url", "yy") == f"--redis-url: got 'yy', {remedy}"


def test_a_wrong_url_of_the_file_of_the_folder_is_told_with_the_file() -> None:
    Path(".env").write_text("REDIS_URL=zz\n")
    for program, arguments in ((cli, ["models"]), (worker, ["run", "-m", "demo"])):
        done = CliRunner().invoke(program, arguments)
        assert "REDIS_URL in .env: got 'zz', not the URL" in done.stderr


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize("path", ["abc", "1/2", "-1"])
def test_a_database_that_is_no_number_is_refused(kind: Any, path: str) -> None:
    with pytest.raises(OmlxQueueError) as caught:
        kind(f"redis://host/{path}")
    assert str(caught.value) == (
        f"connection: got {path!r} for the database; give a number, as in redis://127.0.0.1:6379/0"
    )


@pytest.mark.parametrize("given", [6379, b"redis://host", ["redis://host"]])
@pytest.mark.parametrize(
    ("make", "client"),
    [
        (Producer, ", or a redis.Redis"),
        (AsyncProducer, ""),
        (lambda given: TokenStream(given, "job"), ", or a redis.Redis"),
        (lambda given: AsyncTokenStream(given, "job"), ", or a redis.asyncio.Redis"),
    ],
)
def test_what_is_neither_a_url_nor_a_client_is_an_error_of_this_package(
    make: Callable[[Any], object], client: str, given: Any
) -> None:
    with pytest.raises(OmlxQueueError) as caught:
        make(given)
    assert str(caught.value) == (
        f"connection: got {type(given).__name__}; give a URL such as redis://127.0.0.1:6379/0"
        f"{client}"
    )


def test_a_client_that_decodes_is_an_error_of_this_package() -> None:
    with pytest.raises(OmlxQueueError, match=r"^connection: has decode_responses=True; give "):
        Producer(redis.Redis(decode_responses=True))
