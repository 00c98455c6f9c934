"""What a server says of itself decides whether jobs are left with it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from omlx_producer import AsyncProducer, ModelNotFound, OmlxQueueError, Producer, UnsuitableRedis
from omlx_producer.cli.main import cli
from omlx_producer.connection import is_volatile
from omlx_worker.cli import main as worker
from omlx_worker.queue.embedded import find_server, free_port
from tests.helpers.fake_worker import announce
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.workers import wait_for

EVICTS = r"drops keys when its memory is full \(maxmemory-policy allkeys-lru\), so jobs get lost; "
FLEET = Path(__file__).parents[3] / "docs" / "fleet.md"
RUN = ["run", "--model", "demo", "--burst"]
REMEDY = r"run redis-cli CONFIG SET maxmemory-policy noeviction, or accept the loss with "


@pytest.fixture
def evicting(private_server: RedisServer) -> str:
    """The URL of a server that drops keys when its memory is full; it knows a model."""
    with redis.Redis.from_url(private_server.url) as connection:
        connection.config_set("maxmemory", "100mb")
        connection.config_set("maxmemory-policy", "allkeys-lru")
        announce(connection)
    return private_server.url


def submit(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["submit", "--redis-url", url, "--detach", *arguments, "x"])


async def test_a_producer_submits_nothing_to_a_server_that_may_drop_it(evicting: str) -> None:
    with Producer(evicting) as producer:
        with pytest.raises(UnsuitableRedis, match=EVICTS + REMEDY):
            producer.submit(prompt="x")
        assert not producer.connection.keys("rq:*")
    async with AsyncProducer(evicting) as other:
        with pytest.raises(UnsuitableRedis):
            await other.submit(prompt="x")


async def test_who_accepts_the_loss_submits(evicting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(evicting, allow_eviction=True) as producer:
        producer.submit(prompt="x")
    async with AsyncProducer(evicting, allow_eviction=True) as other:
        await other.submit(prompt="x")
    monkeypatch.setenv("OMLX_QUEUE_ALLOW_EVICTION", "true")
    with Producer(evicting) as producer:
        producer.submit(prompt="x")
    assert submit(evicting).exit_code == 0


def test_a_server_without_a_memory_limit_drops_nothing(evicting: str) -> None:
    with Producer(evicting) as producer:
        producer.connection.config_set("maxmemory", 0)
        producer.submit(prompt="x")


@pytest.mark.parametrize("right", ["-config", "-config -info"])
def test_a_server_that_hides_its_configuration_is_asked_otherwise_or_trusted(
    evicting: str, right: str
) -> None:
    with redis.Redis.from_url(evicting) as owner:
        owner.execute_command(f"ACL SETUSER w on >p ~* &* +@all {right}")
    with Producer(evicting.replace("//", "//w:p@")) as producer:
        if "info" in right:
            producer.require_suitable()
        else:
            with pytest.raises(UnsuitableRedis):
                producer.require_suitable()


def test_the_commands_that_submit_refuse_it_with_exit_code_3(evicting: str, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    rows.write_text("a\nb\n")
    run = ["run", str(rows), "--redis-url", evicting]
    ends = [
        submit(evicting),
        CliRunner().invoke(cli, [*run, "-o", str(out)]),
        CliRunner().invoke(cli, [*run, "--detach"]),
    ]
    for done in ends:
        assert (done.exit_code, done.stderr.count("drops keys")) == (3, 1), done.stderr
    assert not out.exists()


@pytest.mark.parametrize("version", ["6.2.14", "7.0.15"])
async def test_a_server_that_is_too_old_is_refused_with_its_version(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    announce(connection)
    told = redis.Redis.info
    monkeypatch.setattr(
        redis.Redis, "info", lambda self, *of: told(self, *of) | {"redis_version": version}
    )
    said = f"is of version {version}, and jobs need Redis 7.2 or newer, or Valkey; upgrade it, "
    with Producer(redis_url) as producer, pytest.raises(UnsuitableRedis, match=said):
        producer.submit(prompt="x")
    done = submit(redis_url), CliRunner().invoke(worker, [*RUN, "--redis-url", redis_url])
    for each in done:
        assert (each.exit_code, each.stderr.count(said)) == (3, 1), each.stderr
        assert "Traceback" not in each.stderr
    assert not connection.keys("rq:*")


@pytest.mark.parametrize("version", ["7.2.0", "8.2", "10.0.1", "unknown"])
def test_a_server_that_is_new_enough_is_taken(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    told = redis.Redis.info
    monkeypatch.setattr(
        redis.Redis, "info", lambda self, *of: told(self, *of) | {"redis_version": version}
    )
    with Producer(connection) as producer:
        producer.require_suitable()


def test_a_server_with_the_settings_of_the_page_is_one_that_workers_take() -> None:
    block = re.findall(r"^```conf\n(.*?)^```", FLEET.read_text(), re.MULTILINE | re.DOTALL)[0]
    settings = dict(line.split(maxsplit=1) for line in block.splitlines())
    assert settings.pop("bind") == "0.0.0.0"
    password = settings.pop("requirepass")
    options = [word for name, value in settings.items() for word in (f"--{name}", *value.split())]
    with redis_server(*options) as server:
        with Producer(server.url) as owner:
            owner.connection.config_set("requirepass", password)
        with Producer(server.url.replace("//", f"//:{password}@")) as producer:
            producer.require_suitable()
            assert not is_volatile(producer.connection)
        with Producer(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.connection.ping()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[str]:
    """The URL of a Redis Sentinel."""
    port, file = free_port(), tmp_path / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([find_server(), str(file), "--sentinel"], stdout=log)
    try:
        with redis.Redis(port=port) as client:
            wait_for(lambda: answers(client))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_a_sentinel_is_named_with_the_remedy(sentinel: str) -> None:
    said = "is a Redis Sentinel, which holds no jobs; give the URL of the master"
    with Producer(sentinel) as producer, pytest.raises(UnsuitableRedis, match=said):
        producer.submit(prompt="x")
    for done in (submit(sentinel), CliRunner().invoke(cli, ["status", "--redis-url", sentinel])):
        assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
        assert "Sentinel" in done.stderr
        assert "give the URL of the master that it watches" in done.stderr


async def test_a_model_that_no_worker_has_announced_has_an_error_of_its_own(
    redis_url: str, connection: redis.Redis
) -> None:
    announce(connection)
    with Producer(redis_url) as producer:
        with pytest.raises(ModelNotFound, match=r"^model: got 'other', which no worker has announ"):
            producer.submit(model="other", prompt="x")
        with pytest.raises(ModelNotFound, match=r"^request 1: model: got 'other'"):
            producer.submit_many([{"prompt": "x"}, {"model": "other", "prompt": "x"}])
        with pytest.raises(OmlxQueueError) as caught:
            producer.submit(model="other", prompt="x", temperature=9)
        assert not isinstance(caught.value, ModelNotFound)
    async with AsyncProducer(redis_url) as other:
        with pytest.raises(ModelNotFound):
            await other.submit(model="other", prompt="x")


def test_a_producer_follows_more_than_100_streams_at_once(
    redis_url: str, connection: redis.Redis
) -> None:
    announce(connection)
    with Producer(redis_url) as producer:
        jobs = producer.submit_many({"prompt": "x"} for _ in range(120))
        for job in jobs:
            job.cancel()
        streams = [job.stream() for job in jobs]
        assert [next(stream).type for stream in streams] == ["cancelled"] * 120
        for stream in streams:
            stream.close()
