"""The plugin of ``llm``, through its command line; without it these tests are skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result
from rq.defaults import RQ_KEY_PREFIX as RQ

from omlx_producer import Producer
from omlx_producer.schemas import short_schema
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.fake_worker import announce
from tests.helpers.workers import fetch, running_worker, wait_for

pytest.importorskip("llm")

Llm = Callable[..., Result]


@pytest.fixture
def llm(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Llm:
    """The command, with the plugin and a folder of its own."""
    from llm.cli import cli
    from llm.plugins import load_plugins, pm

    from omlx_producer import llm as plugin

    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    load_plugins()
    if not pm.is_registered(plugin):
        pm.register(plugin)
    return lambda *args: CliRunner().invoke(cli, args)


@pytest.fixture
def served(redis_url: str, connection: redis.Redis, llm: Llm) -> Iterator[Llm]:
    """The command, with a worker."""
    with running_worker(redis_url):
        wait_for_model(connection)
        wait_for(lambda: "omlx/fake" in llm("models").output, what="a living worker")
        yield llm


def logged(llm: Llm) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(llm("logs", "-n", "0", "--json").output)
    return found


def test_a_prompt_goes_through_the_queue(served: Llm) -> None:
    arguments = ("-m", "omlx/fake", "hello", "-o", "seed", "7", "-o", "max_tokens", "9")
    first, again = served(*arguments), served(*arguments, "--no-stream")
    assert first.exit_code == 0, first.output
    assert first.output.strip()
    assert again.output == first.output
    assert [entry["output_tokens"] > 0 for entry in logged(served)] == [True, True]


def test_a_conversation_goes_on_after_its_system_prompt(served: Llm) -> None:
    served("-m", "omlx/fake", "-s", "be brief", "hello", "-o", "max_tokens", "5")
    done = served("-c", "and again", "-o", "max_tokens", "5")
    assert done.exit_code == 0, done.output
    first, second = logged(served)
    assert first["conversation_id"] == second["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"] + first["output_tokens"]


def test_a_job_that_nobody_reads_to_its_end_is_cancelled(
    redis_url: str, connection: redis.Redis, llm: Llm
) -> None:
    from llm import Prompt

    from omlx_producer.llm import QueueModel

    model = QueueModel("fake")
    options = QueueModel.Options(max_tokens=5000, seed=1)
    with running_worker(redis_url, step_seconds=0.01), Producer(connection) as producer:
        wait_for_model(connection)
        text = model.execute(Prompt("hello", model, options=options), True, None)
        assert next(text)
        (job_id,) = (key.decode().rpartition(":")[2] for key in connection.keys(f"{RQ}:job:*"))
        text.close()
        wait_for(lambda: producer.status(job_id).status == "cancelled")


def test_a_schema_is_bounded(served: Llm, connection: redis.Redis) -> None:
    served("-m", "omlx/fake", "--schema", "name, year int", "hello")
    (job_id,) = (key.decode().rpartition(":")[2] for key in connection.keys(f"{RQ}:job:*"))
    request = fetch(connection, job_id).kwargs["request"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema == short_schema("name, year int")


def test_a_request_that_is_refused_is_a_sentence(served: Llm) -> None:
    done = served("-m", "omlx/fake", "hello", "-o", "temperature", "3")
    assert done.exit_code == 1
    assert "Error: temperature: got 3.0; give a number from 0 to 2" in done.output


def test_only_models_that_are_served_are_listed(
    llm: Llm, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(connection, "idle")
    assert "omlx/" not in llm("models").output
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", "redis://127.0.0.1:1/0")
    listed = llm("models")
    assert listed.exit_code == 0
    assert "omlx/" not in listed.output
