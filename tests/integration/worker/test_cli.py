"""The command omlx-worker: options, exit codes, and the demo."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import ByteSize
from redis import Redis

from omlx_producer.protocol import MODELS_KEY
from omlx_worker import build, cli, demo
from omlx_worker.build import ModelNotLoaded, load_engine
from omlx_worker.queue import embedded as embedded_redis
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import BREAKS_STEP, FakeEngine
from tests.helpers.workers import enqueue, status


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("REDIS_URL", "OMLX_QUEUE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(settings: WorkerSettings) -> FakeEngine:
        return FakeEngine(settings.max_batch, step_seconds=0.001)

    monkeypatch.setattr(build, "load_engine", load)


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


def test_the_hosts_of_webhooks_come_from_options_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[WorkerSettings] = []
    monkeypatch.setattr(cli, "serve", lambda settings, _: seen.append(settings) or 0)
    monkeypatch.setenv("OMLX_QUEUE_ALLOW_WEBHOOKS", "hooks.example, Other.example")
    for options in ([], ["--allow-webhooks", "A.example", "--allow-webhooks", "b.example"]):
        assert invoke("run", *options).exit_code == 0
    monkeypatch.delenv("OMLX_QUEUE_ALLOW_WEBHOOKS")
    assert invoke("run").exit_code == 0
    assert [set(settings.allow_webhooks) for settings in seen] == [
        {"hooks.example", "other.example"},
        {"a.example", "b.example"},
        set(),
    ]


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "USUAL_PORT", embedded_redis.free_port())
    result = invoke("run", "--embedded-redis", "--redis-dir", str(tmp_path), "--burst")
    assert result.exit_code == 0, result.output
    assert "Redis is at redis://127.0.0.1:" in result.stderr
    assert (tmp_path / "appendonlydir").is_dir()


def test_an_unreachable_redis_exits_with_3_and_one_sentence() -> None:
    result = invoke("run", "--redis-url", "redis://u:secret@127.0.0.1:1/0")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1/0 cannot be used" in result.stderr
    assert "secret" not in result.stderr


def test_a_redis_that_refuses_exits_with_3_and_says_why(redis_url: str) -> None:
    result = invoke("run", "--redis-url", f"{redis_url.removesuffix('/0')}/9999")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "out of range" in result.stderr


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
        "build.load_engine = lambda _: (print('loading', flush=True), time.sleep(60)); "
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
    def load(settings: WorkerSettings) -> Any:
        raise ModelNotLoaded(f"there is no model at {settings.model}")

    monkeypatch.setattr(build, "load_engine", load)
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
        (["--max-batch", "0"], "max_batch: got 0"),
        (["--model-alias", "a b"], "model_alias: got 'a b'"),
        (["--embedded-redis", "--redis-url", "redis://x"], "leave --redis-url out"),
        (["--max-batch", "many"], "not a valid integer"),
        (["--memory-limit", "much"], "memory_limit: got 'much'"),
        (["--patience", "0"], "patience: got 0"),
        (["--model", "/models/My Model (4bit)"], "model: got '/models/My Model (4bit)'; "),
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


@pytest.mark.usefixtures("fake")
def test_the_demo_shows_every_prompt_and_one_line_of_figures() -> None:
    result = invoke("demo", "--max-tokens", "30")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for number in range(1, len(demo.PROMPTS) + 1):
        assert any(line.startswith(f"{number} | ") for line in lines)
    assert lines[-1].startswith(f"{len(demo.PROMPTS)} jobs, ")
    assert "tokens/s, mean batch" in lines[-1]


@pytest.mark.usefixtures("fake")
def test_the_demo_draws_panels_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [demo.Shown(1, "def f():\n", text="    return [1]\n" * 20, tokens=7)]
    panels = demo._Panels(shown)
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panels._draw())
    text = console.export_text()
    console.file.close()
    assert "1: 7 tokens" in text
    assert "return [1]" in text


def test_a_worker_without_mlx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import omlx_worker.engine

    monkeypatch.delattr(omlx_worker.engine, "loader", raising=False)
    monkeypatch.setitem(sys.modules, "omlx_worker.engine.loader", None)

    with pytest.raises(ModelNotLoaded, match=r"pip install 'omlx-queue\[worker\]'"):
        load_engine(WorkerSettings())


def test_a_memory_limit_below_the_weights_is_refused_with_both_figures() -> None:
    with pytest.raises(ModelNotLoaded, match=r"got 1\.0 MiB, but .* take \d+\.\d MiB"):
        load_engine(WorkerSettings(model="demo", memory_limit=ByteSize(2**20)))
