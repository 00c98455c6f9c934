"""The examples are short, and they run."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet
from redis import Redis

from omlx_producer import AsyncProducer, Producer
from omlx_producer.connection import server_time
from omlx_producer.wire import MODELS_KEY, ModelInfo, tokens_channel
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.workers import running_worker, worker_process

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.py"))
MAX_LINES = 40
VECTOR_SIZES = {"search": 4}


@pytest.fixture(params=["REDIS_URL", "OMLX_QUEUE_REDIS_URL"])
def arguments(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> dict[str, list[str]]:
    """The command line of each example that needs one, and a server for all of them."""
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.delenv("OMLX_QUEUE_REDIS_URL", raising=False)
    monkeypatch.setenv(request.param, redis_url)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("first\nsecond\n")
    with Producer() as producer:
        job = producer.submit(model="fake", prompt="x", require_known_model=False)
        other = ModelInfo(model="other", context_length=10, longest_token=1)
        told = other.model_copy(update={"announced_at": server_time(producer.connection)})
        producer.connection.hset(MODELS_KEY, "another", told.model_dump_json())
    vectors = tmp_path / "vectors.parquet"
    rows = [{"id": n, "embedding": [0.0] * n + [1.0] + [0.0] * (3 - n)} for n in range(4)]
    parquet.write_table(arrow.Table.from_pylist([*rows, {"id": 4, "embedding": None}]), vectors)
    return {
        "bulk": [str(prompts), str(output)],
        "search": [str(vectors), "fake", "What?"],
        "plain_redis_consumer": [job.id],
    }


def check(name: str, output: str) -> None:
    """What an example prints, where the fake engine says what that is."""
    if name == "plain_redis_consumer":
        events = [json.loads(line) for line in output.splitlines()]
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        counts = [event["n"] for event in events]
        assert events[-1]["type"] == "done"
        assert counts == sorted(counts)
        assert len(text) == events[-1]["usage"]["completion_tokens"]
    elif name == "bulk":
        assert [line.split()[0] for line in output.splitlines()] == ["row-1", "row-2"]
    elif name == "search":
        # The vector of its five letters is 5, 6, 7 and 8.
        found = [f"{8 - n}.000 {{'id': {3 - n}}}\n" if n < 3 else "5.000 {}\n" for n in range(4)]
        assert output == "".join(found)
    elif name == "after_each_job":
        assert re.fullmatch(r"(\d+ tokens: .+\n){3}", output)
    elif name == "async_client":
        assert output.splitlines()[-1].startswith("20 jobs, ")
    else:
        assert " tokens" in output


def test_every_example_is_short() -> None:
    long = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path,
    redis_url: str,
    connection: Redis,
    arguments: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.get(path.stem, [])])
    with running_worker(redis_url, vector_size=VECTOR_SIZES.get(path.stem, 0)):
        wait_for_model(connection)
        runpy.run_path(str(path), run_name="__main__")
    check(path.stem, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("plain_redis_consumer", [], "plain_redis_consumer.py: give the id of a job"),
        (
            "bulk",
            ["nofile.txt", "out.jsonl"],
            "bulk.py: nofile.txt: there is no such file; give the path of a file",
        ),
    ],
)
def test_a_wrong_command_line_of_an_example_is_told_in_one_sentence(
    name: str,
    arguments: list[str],
    sentence: str,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    path = EXAMPLES[0].with_name(f"{name}.py")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == sentence


def test_the_plain_consumer_takes_each_event_once_also_when_cut_off(
    redis_url: str, connection: Redis
) -> None:
    follow = runpy.run_path(str(EXAMPLES[0].with_name("plain_redis_consumer.py")))["follow"]
    with Producer(connection) as producer:
        job = producer.submit(model="fake", prompt="x", require_known_model=False)
    worker = FakeWorker(connection, job.id)
    worker.start()
    first = worker.step("a")
    events = follow(redis_url, job.id)
    assert next(events)["n"] == 1
    connection.publish(tokens_channel(job.id), first.model_dump_json())
    worker.step("b")
    assert next(events)["n"] == 2
    connection.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    worker.step("c")
    worker.finish()
    assert [(event["type"], event["n"]) for event in events] == [("tokens", 3), ("done", 3)]


async def test_what_comes_after_each_job_is_told_of_those_that_did_not_finish(
    redis_url: str, connection: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    after = runpy.run_path(str(EXAMPLES[0].with_name("after_each_job.py")))["after"]
    async with AsyncProducer(redis_url) as producer:
        job = await producer.submit(model="fake", prompt="x", require_known_model=False)
        await job.cancel()
        await after(job)
    assert re.fullmatch(r"failed: .*cancelled.*\n", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_a_process(
    path: Path, redis_url: str, connection: Redis, arguments: dict[str, list[str]]
) -> None:
    with worker_process(redis_url, vector_size=VECTOR_SIZES.get(path.stem, 0)):
        wait_for_model(connection)
        done = subprocess.run(
            [sys.executable, path, *arguments.get(path.stem, [])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    check(path.stem, done.stdout)
