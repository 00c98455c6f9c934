"""The command omlx-worker: options and exit codes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import ByteSize
from redis import Redis
from rq.utils import now, utcformat

from omlx_producer.wire import MODELS_KEY
from omlx_worker import cli
from omlx_worker.build import load_engine
from omlx_worker.engine.rows.interface import ModelError, Tell
from omlx_worker.queue import embedded as embedded_redis
from omlx_worker.settings import WorkerSettings
from tests.helpers.checkpoints import write_llama
from tests.helpers.fake_engine import BREAKS_STEP, FakeEngine
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.workers import enqueue, loads, queue, status, wait_for


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("REDIS_URL", "OMLX_QUEUE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMLX_QUEUE_MODEL", "demo")
    yield
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(settings: WorkerSettings, _: Tell) -> FakeEngine:
        return FakeEngine(settings.most_rows, step_seconds=0.001)

    loads(monkeypatch, load)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


@pytest.mark.usefixtures("fake")
def test_a_burst_serves_what_is_queued_and_exits_with_0(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection)
    result = invoke(
        "run", "--model", "/models/fake", "--redis-url", redis_url, "--burst", "--max-batch", "2"
    )
    assert result.exit_code == 0, result.output
    assert status(job) == "finished"
    assert connection.hexists(MODELS_KEY, "fake")


def test_the_server_is_the_one_that_producers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("omlx_worker.run.serve", lambda _, url: seen.append(url) or 0)
    monkeypatch.chdir(tmp_path)
    assert invoke("run").exit_code == 0
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert invoke("run").exit_code == 0
    Path(".env").write_text("OMLX_QUEUE_REDIS_URL=redis://a\n")
    assert invoke("run").exit_code == 0
    assert invoke("run", "--redis-url", "redis://c").exit_code == 0
    assert seen == ["redis://127.0.0.1:6379/0", "redis://b", "redis://a", "redis://c"]


@pytest.mark.usefixtures("fake")
def test_settings_come_from_the_environment_too(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("OMLX_QUEUE_MODEL_ALIAS", "other")
    assert invoke("run", "--burst").exit_code == 0
    assert connection.hkeys(MODELS_KEY) == [b"other"]


@pytest.mark.usefixtures("fake")
def test_an_embedded_server_lives_as_long_as_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded_redis, "USUAL_PORT", embedded_redis.free_port())
    result = invoke("run", "--embedded-redis", "--redis-dir", str(tmp_path), "--burst")
    assert result.exit_code == 0, result.output
    assert "Redis is at redis://127.0.0.1:" in caplog.text
    assert (tmp_path / "appendonlydir").is_dir()


@pytest.mark.usefixtures("fake")
def test_clients_are_told_where_redis_is_when_the_usual_port_is_taken(
    tmp_path: Path,
    private_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(embedded_redis, "USUAL_PORT", private_server.port)
    result = invoke("run", "--embedded-redis", "--redis-dir", str(tmp_path), "--burst")
    assert result.exit_code == 0, result.output
    (url,) = re.findall(r"Redis is at (\S+)", caplog.text)
    assert f"port {private_server.port} is taken: pass --redis-url {url}" in caplog.text


@pytest.mark.usefixtures("fake")
def test_the_log_has_the_level_and_the_format_that_the_user_chose(
    private_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Redis.from_url(private_server.url)
    connection.config_set("appendonly", "yes")
    monkeypatch.setenv("REDIS_URL", private_server.url)
    monkeypatch.setenv("OMLX_QUEUE_LOG_FORMAT", "json")
    monkeypatch.setattr(logging.root, "handlers", [])
    job = enqueue(connection)
    entries = list(map(json.loads, invoke("run", "-m", "fake", "--burst").stderr.splitlines()))
    assert entries[0]["message"] == f"omlx-queue {version('omlx-queue')} loads fake"
    assert [entry["event"] for entry in entries if entry.get("job") == job.id] == [
        "starts",
        "finished",
    ]
    monkeypatch.setattr(logging.root, "handlers", [])
    enqueue(connection)
    assert invoke("run", "-m", "fake", "--burst", "--log-level", "warning").stderr == ""


@pytest.mark.parametrize(
    ("drafters", "drafts"),
    [(None, "no drafts"), ("head, lookup", "drafts up to 4 a step by head, lookup")],
)
def test_the_log_says_once_that_the_worker_is_ready_and_how_it_drafts(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, drafters: str | None, drafts: str
) -> None:
    engine = FakeEngine()
    engine.drafters, engine.max_depth = drafters, 4
    loads(monkeypatch, lambda *_: engine)
    monkeypatch.setattr(logging.root, "handlers", [])
    log = invoke("run", "-m", "fake", "--redis-url", redis_url, "--burst", "--name=mac-1").stderr
    assert log.count(f"I fake is ready: worker mac-1, {drafts} (--mode auto)\n") == 1
    assert re.findall(r"version|\x1b", log) == [], "the version of RQ is not this worker's"


def test_a_name_that_a_living_worker_has_is_refused_before_the_model_is_loaded(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, lambda *_: pytest.fail("loads the model"))
    living = {"hostname": "elsewhere", "pid": "1", "last_heartbeat": utcformat(now())}
    connection.hset("rq:worker:mac-1", mapping=living)
    result = invoke("run", "--redis-url", redis_url, "--name", "mac-1", "--burst")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "name: got 'mac-1', the name of a worker that was alive" in result.stderr
    assert connection.hgetall("rq:worker:mac-1").keys() == {name.encode() for name in living}


def test_an_unreachable_redis_exits_with_3_and_one_sentence() -> None:
    result = invoke("run", "--redis-url", "redis://u:secret@127.0.0.1:1/0")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1/0 does not answer (" in result.stderr
    assert result.stderr.endswith("or pass --embedded-redis\n")
    assert "secret" not in result.stderr


def test_a_redis_that_refuses_exits_with_3_and_says_why(redis_url: str) -> None:
    result = invoke("run", "--redis-url", f"{redis_url.removesuffix('/0')}/9999")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(
        "/9999 has no database of this number; end the URL in a smaller one, as in /0\n"
    )


def evict(url: str) -> None:
    with Redis.from_url(url) as owner:
        owner.config_set("maxmemory", "100mb")
        owner.config_set("maxmemory-policy", "volatile-lru")


@pytest.mark.usefixtures("fake")
def test_a_redis_that_may_drop_jobs_is_refused_with_the_command_that_mends_it(
    private_server: RedisServer,
) -> None:
    evict(private_server.url)
    command = ("run", "--model", "fake", "--redis-url", private_server.url, "--burst")
    result = invoke(*command)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "(maxmemory-policy volatile-lru), so jobs get lost; run redis-cli" in result.stderr
    assert invoke(*command, "--allow-eviction").exit_code == 0
    _, _, advice = result.stderr.partition("run redis-cli ")
    with Redis.from_url(private_server.url) as owner:
        owner.execute_command(advice.partition(",")[0])
    assert invoke(*command).exit_code == 0


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("changes", "told"),
    [({}, 1), ({"appendonly": "yes"}, 0), ({"save": "60 1000"}, 0)],
)
def test_a_redis_that_keeps_nothing_on_disk_is_named_once(
    private_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, str],
    told: int,
) -> None:
    with Redis.from_url(private_server.url) as owner:
        for name, value in changes.items():
            owner.config_set(name, value)
    invoke("run", "--model", "fake", "--redis-url", private_server.url, "--burst")
    warnings = [r.getMessage() for r in caplog.records if "on disk" in r.getMessage()]
    assert len(warnings) == told
    assert all("redis-cli CONFIG SET appendonly yes" in warning for warning in warnings)


def burst_without(server: RedisServer, command: str) -> tuple[Result, str]:
    """Serve a job as a user without a command; returns also the job's status after it."""
    with Redis.from_url(server.url) as owner:
        owner.execute_command(f"ACL SETUSER w on >p ~* &* +@all -{command}")
        job = enqueue(owner)
        url = server.url.replace("//", "//w:p@")
        return invoke("run", "--model", "fake", "--redis-url", url, "--burst"), status(job)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("command", ["zadd", "xadd", "evalsha", "smembers"])
def test_a_user_without_a_right_that_jobs_need_exits_with_3_and_the_command(
    private_server: RedisServer, command: str
) -> None:
    result, after = burst_without(private_server, command)
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert f"user w has no permissions to run the '{command}' command" in result.stderr
    assert "grant it with ACL SETUSER" in result.stderr
    assert after in ("queued", "started")


@pytest.mark.usefixtures("fake")
def test_a_key_of_another_type_exits_with_3_and_what_redis_says(
    redis_url: str, connection: Redis
) -> None:
    connection.set(queue(connection).key, "of another type")
    result = invoke("run", "--model", "fake", "--redis-url", redis_url, "--burst")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "(WRONGTYPE Operation against a key holding the wrong kind of value" in result.stderr
    assert "delete or rename it" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_redis_cluster_exits_with_3_and_is_called_one() -> None:
    port = str(embedded_redis.free_port())
    with redis_server("--cluster-enabled", "yes", "--cluster-port", port) as server:
        with Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
            wait_for(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        result = invoke("run", "--model", "fake", "--redis-url", server.url, "--burst")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "is part of a Redis Cluster, and jobs need all keys on one server" in result.stderr


@pytest.mark.usefixtures("fake")
def test_half_a_redis_cluster_is_no_outage() -> None:
    port = str(embedded_redis.free_port())
    with redis_server("--cluster-enabled", "yes", "--cluster-port", port) as server:
        result = invoke("run", "--model", "fake", "--redis-url", server.url)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "is part of a Redis Cluster" in result.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://h:26379/mymaster", "Redis Sentinel is not supported"),
        ("redis://h:26379/0?service_name=mymaster", "has an option behind its ?"),
        ("redis://me:12/secret@h/0", "has an @ behind a /"),
    ],
)
def test_a_url_that_cannot_work_exits_with_2_and_one_sentence(url: str, said: str) -> None:
    result = invoke("run", "--redis-url", url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"--redis-url: {said}" in result.stderr
    assert "secret" not in result.stderr


def test_a_url_that_is_none_exits_with_2_and_shows_no_password() -> None:
    result = invoke("run", "--redis-url", "redis://u:secret@[::1")
    assert result.exit_code == 2
    assert "--redis-url: not the URL of a Redis server" in result.stderr
    assert "secret" not in result.stderr


def test_a_data_folder_below_a_file_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "data"
    result = invoke("run", "--embedded-redis", "--redis-dir", str(folder))
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert f"cannot keep its data in {folder} (Not a directory)" in result.stderr
    assert "--redis-dir" in result.stderr


def test_an_interrupt_while_the_model_loads_exits_with_130(redis_url: str, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from omlx_worker import build, cli; "
        "build.load_engine = lambda *_: (print('loading', flush=True), time.sleep(60)); "
        "cli.main(sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "run", "--redis-url", redis_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "Aborted" not in err


def test_an_unknown_model_exits_with_2(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(settings: WorkerSettings, _: Tell) -> Any:
        raise ModelError(f"there is no model at {settings.model}")

    loads(monkeypatch, load)
    result = invoke("run", "--model", "/nowhere", "--redis-url", redis_url)
    assert result.exit_code == 2
    assert "omlx-worker: there is no model at /nowhere" in result.stderr


@pytest.mark.usefixtures("fake")
def test_an_engine_that_breaks_exits_with_1(redis_url: str, connection: Redis) -> None:
    for _ in range(3):
        enqueue(connection, BREAKS_STEP)
    result = invoke("run", "--model", "fake", "--redis-url", redis_url, "--max-batch", "1")
    assert result.exit_code == 1
    assert "the device was lost" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-batch", "0"], "--max-batch: got 0; give a whole number from 1 to 1024"),
        (
            ["--model-alias", "a b"],
            "--model-alias: got 'a b'; give a model's alias, 1 to 200 letters",
        ),
        (["--embedded-redis", "--redis-url", "redis://x"], "leave --redis-url out"),
        (["--redis-dir", "/tmp"], "--redis-dir is for --embedded-redis; add that"),
        (["--max-batch", "many"], "--max-batch: got many; give a whole number from 1 to 1024"),
        (["--memory-limit", "much"], "--memory-limit: got much; give a size such as 24GB"),
        (["--lease-seconds", "0"], "--lease-seconds: got 0; give a number from 1 to 86400"),
        (["--lease-seconds", "inf"], "--lease-seconds: got inf; give a number from 1 to 86400"),
        (["--name", ""], "--name: got ''; give letters, digits and . _ -"),
        (["-m", "/models/My Model (4bit)"], "--model: got '/models/My Model (4bit)'; "),
        (["--model", "/models/My Model (4bit)"], "give it another with --model-alias"),
    ],
)
def test_wrong_options_exit_with_2(arguments: list[str], said: str) -> None:
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("model", "alias"),
    [
        ("demo", "demo"),
        ("mlx-community/Qwen3.5-4B-4bit", "Qwen3.5-4B-4bit"),
        ("/models/mine/", "mine"),
    ],
)
def test_a_model_is_known_by_the_last_part_of_its_path(model: str, alias: str) -> None:
    assert WorkerSettings(model=model).alias == alias


def test_a_model_whose_path_is_no_alias_needs_one() -> None:
    path = "/models/My Model (4bit)"
    assert WorkerSettings(model=path, model_alias="mine").alias == "mine"


def test_a_memory_limit_below_the_weights_is_refused_with_both_figures(tmp_path: Path) -> None:
    model = str(write_llama(tmp_path))
    with pytest.raises(ModelError, match=r"got 1 KiB, but .* take \d+ KiB"):
        load_engine(WorkerSettings(model=model, memory_limit=ByteSize(2**10)))


@pytest.mark.slow
def test_a_worker_that_has_loaded_in_vain_ends_in_peace(redis_url: str) -> None:
    """MLX aborts a process that ends before the work of a thread's streams, about every other."""
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run", "--burst"]
    command += ["--redis-url", redis_url, "--memory-limit", "1M"]
    codes = [subprocess.run(command, capture_output=True).returncode for _ in range(6)]
    assert codes == [2] * 6


def test_a_password_that_is_refused_is_told_as_such(private_server: RedisServer) -> None:
    with Redis.from_url(private_server.url) as connection:
        connection.config_set("requirepass", "right")
    result = invoke("run", "--redis-url", private_server.url.replace("//", "//:wrong@"))
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "refuses the user or password" in result.stderr
