"""`omlx-worker batch` where it starts no worker; tests/system/worker has the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from omlx_producer.bulk import progress
from omlx_worker import at_home as at_home_module
from omlx_worker import batch as batch_module
from omlx_worker import cli
from omlx_worker.queue.embedded import running_url
from tests.helpers.bulk_runs import count_lines, ids, write_rows
from tests.helpers.image_parts import grey
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import ALIAS, wait_for, worker_process

Batch = Callable[..., Result]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """The command in a folder, where it may start no worker."""

    def no_worker(*_: object) -> None:
        pytest.fail("a worker was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch_module, "OwnWorker", no_worker)
    return lambda *args: CliRunner().invoke(
        cli.main, ["batch", *args, "--redis-dir", str(tmp_path / "redis")], prog_name="omlx-worker"
    )


@contextlib.contextmanager
def worker(
    url: str, connection: redis.Redis, lease_seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of this machine that has written its figures."""
    with worker_process(url, lease_seconds=lease_seconds, step_seconds=0.02) as process:
        wait_for(lambda: connection.exists(f"omlx:workers:{ALIAS}"), what="a living worker")
        yield process


@pytest.fixture
def at_home(redis_url: str, connection: redis.Redis) -> Iterator[str]:
    """The URL of a Redis with a worker of this machine."""
    with worker(redis_url, connection, 30.0):
        yield redis_url


def test_a_worker_of_this_machine_runs_the_rows(batch: Batch, at_home: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 5, model="gpt-4o-mini")
    done = batch("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--redis-url", at_home)
    assert done.exit_code == 0, done.output
    assert f"of this machine serves {ALIAS}; using it\n" in done.stderr
    assert sorted(ids(tmp_path / "out.jsonl")) == [f"r{n}" for n in range(5)]


def test_a_folder_of_pictures_is_an_input(batch: Batch, at_home: str, tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans/a.png").write_bytes(grey())
    command = ("-m", ALIAS, "scans", "-o", "out.jsonl", "--template", "What is it?")
    done = batch(*command, "--redis-url", at_home)
    assert done.exit_code == 0, done.output
    assert ids(tmp_path / "out.jsonl") == ["a.png"]


def test_options_that_a_running_worker_decides_itself_are_named(
    batch: Batch, at_home: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 2)
    own = ("--fixed-shapes", "--max-batch", "8", "--mode", "batched")
    done = batch("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--redis-url", at_home, *own)
    assert done.exit_code == 0, done.output
    assert "; using it, with its own --max-batch, --mode, --fixed-shapes\n" in done.stderr


def test_without_a_variable_no_server_is_asked_but_one_of_its_own_folder(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REDIS_URL", "OMLX_QUEUE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(at_home_module, "connect", lambda url, **_: pytest.fail(f"asked {url}"))
    write_rows(tmp_path / "rows.jsonl", 1)
    done = batch("-m", ALIAS, "rows.jsonl", "--dry-run")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "redis/server.log").exists()


def test_a_server_without_the_lock_of_the_folder_may_be_anybodys(
    private_server: RedisServer,
) -> None:
    with redis.Redis.from_url(private_server.url) as client:
        assert client.config_get("dir")["dir"] == str(private_server.folder.resolve())
    assert running_url(private_server.folder) is None


def test_the_worker_at_the_redis_of_a_variable_is_found(
    batch: Batch, at_home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", at_home)
    write_rows(tmp_path / "rows.jsonl", 2)
    done = batch("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    assert (done.exit_code, done.stderr) == (0, "")
    assert not (tmp_path / "redis/server.log").exists()


def test_a_worker_of_another_model_with_the_name_is_not_used(
    batch: Batch, at_home: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    given = ("-m", "other/fake", "rows.jsonl", "-o", "out.jsonl", "--redis-url", at_home)
    done = batch(*given)
    assert done.exit_code == 2
    assert done.stderr == (
        "omlx-worker: --model: got other/fake, but a worker of this machine serves fake as fake; "
        "give another --model-alias\n"
    )


def test_after_failures_it_says_how_to_start_a_worker_on_the_same_redis(
    batch: Batch, at_home: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1, max_tokens=90)
    given = ("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--job-timeout", "1")
    command = f"omlx-worker run --model {ALIAS}"
    done = batch(*given, "--redis-url", at_home)
    assert done.exit_code == 1, done.output
    assert f"; start {command} --redis-url {at_home} in another ter" in done.stderr
    done = batch(*given, "--replace", "--redis-url", at_home.replace("//", "//default:secret@"))
    same = "with OMLX_QUEUE_REDIS_URL set to the same URL"
    assert f"; {same} start {command} in another ter" in done.stderr
    assert "secret" not in done.output


def test_a_finished_file_needs_no_worker(
    batch: Batch, redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    line = ("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--redis-url", redis_url)
    with worker(redis_url, connection, 30.0):
        assert batch(*line).exit_code == 0
    done = batch(*line)
    assert done.exit_code == 0, done.output
    assert ": 0 ok, 0 failed; done before: 3\n" in done.stderr


@pytest.mark.slow
def test_a_file_outlives_the_worker_of_somebody_else(
    batch: Batch,
    redis_url: str,
    connection: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    output, said = tmp_path / "out.jsonl", list[str]()
    line = ("-m", ALIAS, "rows.jsonl", "-o", "out.jsonl", "--redis-url", redis_url)

    def hear(text: str, **_: object) -> None:
        if not said:
            os.kill(os.getpid(), signal.SIGINT)
        said.append(text)

    def kill(worker: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: count_lines(output) >= 4, what="rows that end")
        worker.kill()
        worker.wait()
        # As if it had been silent for long.
        connection.delete(f"omlx:workers:{ALIAS}")

    monkeypatch.setattr(progress, "FIGURES_SECONDS", 0.0)
    with monkeypatch.context() as patched, worker(redis_url, connection, 30.0) as process:
        patched.setattr(progress, "write", hear)
        with ThreadPoolExecutor() as pool:
            killed = pool.submit(kill, process)
            left = batch(*line)
            killed.result()
    assert said[0] == f"no worker serves {ALIAS}; rows wait, and Ctrl-C loses none\n"
    assert left.exit_code == 130
    assert "\nstopping; waiting for the rows that run, " in left.stderr
    assert " continue with: omlx-worker " in left.stderr
    assert not connection.keys("omlx:batch:*:waiting:*")
    before = count_lines(output)
    with worker(redis_url, connection, 1.0):
        assert batch(*line).exit_code == 0
    assert 4 <= before < 40
    assert sorted(ids(output)) == sorted(f"r{n}" for n in range(40))


def test_rows_are_counted_without_a_worker(batch: Batch, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    done = batch("-m", ALIAS, "rows.jsonl", "--dry-run")
    assert done.exit_code == 0, done.output
    assert '"rows": 3, "bad": {}' in done.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["none.csv", "-o", "out.csv"], "none.csv: there is no such file; give the path"),
        (["rows.csv"], "--output: missing; say where results go"),
        (["rows.csv", "-o", "rows.csv", "--template", "{text}"], "rows.csv: would write over"),
        (
            ["rows.csv", "-o", "out.csv", "--template", "{name}"],
            "--template: got '{name}', but the input lacks the column name; it has id, text",
        ),
        (["rows.csv", "-o", "out.csv", "--templte", "{text}"], "--templte: no such option; did "),
        (["rows.csv", "-o", "out.csv", "--temperature", "5"], "--temperature: got 5.0; give a "),
        (["rows.csv", "-o", "out.csv", "--max-batch", "0"], "--max-batch: got 0; give a whole "),
        (["rows.csv", "-o", "other.csv", "--template", "{text}"], "other.csv: exists and is of no"),
        (
            ["rows.csv", "-o", "out.csv", "-m", "other"],
            "--model is given more than once; omlx-worker run alone serves several\n",
        ),
        (["-o", "out.csv"], "INPUT: missing; see omlx-worker batch --help"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    batch: Batch, tmp_path: Path, given: list[str], said: str
) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n1,a\n")
    (tmp_path / "other.csv").write_text("something\n")
    done = batch("-m", "demo", *given)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"omlx-worker: {said}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.csv.run").exists()


def test_a_folder_that_cannot_be_used_is_named_with_its_option(
    batch: Batch, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    (tmp_path / "redis").write_text("")
    done = batch("-m", "demo", "rows.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 2, done.output
    assert done.stderr == (
        f"omlx-worker: --redis-dir {tmp_path}/redis: File exists; name another folder\n"
    )


def test_options_of_the_worker_and_of_the_run_have_names_of_their_own() -> None:
    flags = [flag for param in batch_module.batch.params for flag in param.opts]
    names = [param.name for param in batch_module.batch.params]
    assert len(flags) == len(set(flags))
    assert len(names) == len(set(names))
