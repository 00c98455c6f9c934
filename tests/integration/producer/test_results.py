"""Results are waited for without polling, and every end has its answer."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from rq import Queue
from rq.results import Result

from omlx_producer import (
    AsyncProducer,
    JobCancelled,
    JobError,
    JobFailed,
    JobHandle,
    JobTimeout,
    MalformedResult,
    Producer,
    UnknownJob,
)
from omlx_producer import connection as connection_module
from omlx_producer.cli.main import cli
from omlx_producer.client.outcome import results_key
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.redis_server import RedisServer
from tests.helpers.waiting import fetch, later


def test_a_result_is_waited_for(job: JobHandle, worker: FakeWorker) -> None:
    thread = later(lambda: worker.finish("length"))
    body = job.result(timeout=10)
    thread.join()
    assert body["choices"][0]["finish_reason"] == "length"
    assert job.result(timeout=0) == body


def test_waiting_sends_no_more_than_a_few_commands(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    before = connection.info("stats")["total_commands_processed"]
    thread = later(worker.finish, 1.5)
    job.result()
    thread.join()
    assert connection.info("stats")["total_commands_processed"] - before < 40


@pytest.mark.slow
def test_waiting_longer_than_the_socket_timeout_is_fine(
    redis_url: str, job: JobHandle, worker: FakeWorker
) -> None:
    with redis.Redis.from_url(redis_url, socket_timeout=0.8, retry=None) as impatient:
        thread = later(worker.finish, 2)
        assert Producer(impatient).result(job.id, timeout=10)
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_result_is_waited_for_through_a_restart_of_the_server(
    private_server: RedisServer, asynchronous: bool
) -> None:
    private_server.stop()
    private_server.options = ("--appendonly", "yes")
    private_server.start()

    async def wait(job_id: str) -> Any:
        async with AsyncProducer(private_server.url) as producer:
            return await producer.result(job_id, timeout=30)

    with redis.Redis.from_url(private_server.url) as connection:
        job = Producer(connection).submit(model="m", prompt="x", require_known_model=False)
        worker = FakeWorker(connection, job.id)
        worker.start()
        connection.config_set("appendfsync", "always")

        def restart() -> None:
            private_server.kill()
            time.sleep(2.5)
            private_server.start()
            worker.finish()

        thread = later(restart, 0.5)
        body = asyncio.run(wait(job.id)) if asynchronous else job.result(timeout=30)
        thread.join()
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_timeout_passes_while_the_server_is_away(
    private_server: RedisServer, asynchronous: bool
) -> None:
    async def wait(job_id: str) -> Any:
        async with AsyncProducer(private_server.url) as producer:
            return await producer.result(job_id, timeout=2)

    with redis.Redis.from_url(private_server.url) as connection:
        job = Producer(connection).submit(model="m", prompt="x", require_known_model=False)
        thread = later(private_server.kill, 0.5)
        with pytest.raises(JobTimeout):
            asyncio.run(wait(job.id)) if asynchronous else job.result(timeout=2)
        thread.join()


def test_a_result_that_does_not_come_times_out(job: JobHandle) -> None:
    with pytest.raises(JobTimeout, match=r"did not finish within 0.2 s"):
        job.result(timeout=0.2)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)


def test_a_failure_is_raised_with_its_sentence(job: JobHandle, worker: FakeWorker) -> None:
    thread = later(lambda: worker.fail("Traceback:\n  ...\nprompt: got too many tokens"))
    with pytest.raises(JobFailed, match=r"^prompt: got too many tokens$") as caught:
        job.result(timeout=10)
    thread.join()
    assert caught.value.job_id == job.id


def test_a_stopped_job_is_raised_as_cancelled(job: JobHandle, worker: FakeWorker) -> None:
    worker.stop("the job was stopped on request")
    with pytest.raises(JobCancelled, match="on request"):
        job.result()


def test_a_job_cancelled_by_another_tool_is_noticed(
    connection: redis.Redis, job: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's own cancel writes no result and so wakes nobody."""
    monkeypatch.setattr(connection_module, "LONGEST_BLOCK_SECONDS", 0.5)
    thread = later(lambda: fetch(connection, job.id).cancel())
    with pytest.raises(JobCancelled):
        job.result(timeout=10)
    thread.join()


def test_an_unknown_job_has_no_result(producer: Producer) -> None:
    for job_id in ("nope", "rq:odd", "", "\ud800"):
        with pytest.raises(UnknownJob):
            producer.result(job_id)
        with pytest.raises(UnknownJob):
            list(producer.stream(job_id))
        with pytest.raises(UnknownJob):
            producer.status(job_id)
        with pytest.raises(UnknownJob):
            producer.cancel(job_id)


def test_a_job_that_finished_long_ago_has_no_result(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    worker.finish()
    connection.delete(f"rq:results:{job.id}")
    with pytest.raises(UnknownJob, match="expired"):
        job.result()


def test_a_pickled_result_is_never_read(connection: redis.Redis, producer: Producer) -> None:
    job = Queue("other", connection=connection).enqueue("os.getcwd")
    Result.create(job, Result.Type.SUCCESSFUL, 60, return_value={"a": 1})
    connection.hset(job.key, "status", "finished")
    with pytest.raises(MalformedResult, match=r"not that of a generation job \(not JSON\)"):
        producer.result(job.id)


DEEP = "nested too deeply"


def nested(levels: int) -> bytes:
    """A result that ends in lists inside each other."""
    return base64.b64encode(b'{"choices": [], "x": ' + b"[" * levels + b"]" * levels + b"}")


@pytest.mark.parametrize("command", ["result", "watch"])
def test_the_command_line_says_of_a_deep_result_what_is_wrong(
    redis_url: str, connection: redis.Redis, job: JobHandle, worker: FakeWorker, command: str
) -> None:
    worker.finish(event=False)
    connection.xadd(results_key(job.id), {"type": "1", "return_value": nested(100_000)})
    done = CliRunner().invoke(cli, [command, job.id, "--redis-url", redis_url])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.stderr
    assert DEEP in done.stderr


@pytest.mark.parametrize(
    ("sentence", "code", "field"),
    [
        ("prompt: 9 tokens do not fit the context of demo", "invalid_request", "prompt"),
        ("the job's payload is a pickle", "invalid_request", ""),
        ("the engine failed on this job: out of memory", "failed", ""),
    ],
)
async def test_a_failure_has_a_code_that_says_whether_another_try_may_help(
    redis_url: str, job: JobHandle, worker: FakeWorker, sentence: str, code: str, field: str
) -> None:
    worker.fail(sentence, code, field)
    with pytest.raises(JobFailed) as caught:
        job.result()
    failed = caught.value
    assert (failed.code, failed.field, str(failed)) == (code, field, sentence)
    async with AsyncProducer(redis_url) as producer:
        with pytest.raises(JobFailed) as caught:
            await producer.result(job.id)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"type": "1", "return_value": base64.b64encode(b'{"choices": [')}, "not JSON"),
        ({"type": "1", "return_value": base64.b64encode(b"[1]")}, "not a JSON object"),
        ({"type": "1", "return_value": base64.b64encode(b'{"choices": 1}')}, "choices: "),
        ({"return_value": base64.b64encode(b"{}")}, "not written by RQ"),
        ({"type": "2", "exc_string": base64.b64encode(b"?")}, "not written by RQ"),
        *(({"type": "1", "return_value": nested(levels)}, DEEP) for levels in (200, 960, 100_000)),
    ],
)
def test_a_malformed_result_is_a_sentence(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker, entry: Any, reason: str
) -> None:
    worker.finish(event=False)
    connection.xadd(results_key(job.id), entry)
    with pytest.raises(MalformedResult, match=rf"^the result of job {job.id} .*\({reason}"):
        job.result()
    with pytest.raises(JobError):
        list(job.stream())


def test_the_state_of_a_job_follows_it(producer: Producer, connection: redis.Redis) -> None:
    first, second = producer.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    assert (first.state().status, first.state().position) == ("queued", 0)
    assert second.state().position == 1
    worker = FakeWorker(connection, first.id)
    worker.start("mac-1")
    worker.step("a", tokens=3)
    state = first.state()
    assert (state.status, state.worker, state.tokens) == ("started", "mac-1", 3)
    assert state.position is None
    worker.finish()
    assert first.state().status == "finished"
    worker = FakeWorker(connection, second.id)
    worker.start()
    worker.fail("no memory")
    assert (second.state().status, second.state().error) == ("failed", "no memory")
