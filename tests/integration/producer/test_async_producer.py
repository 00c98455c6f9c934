"""The asyncio client does what the sync one does; waits cost no threads and one connection."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import isfunction
from typing import Any

import pytest
import redis

from omlx_producer import (
    AsyncJobHandle,
    AsyncProducer,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobHandle,
    JobTimeout,
    MalformedResult,
    OmlxQueueError,
    Producer,
    UnknownJob,
)
from omlx_producer import connection as connection_module
from omlx_producer.client import reader
from omlx_producer.client.outcome import results_key
from omlx_producer.outage import Reconnection
from tests.helpers.fake_worker import FakeWorker, announce
from tests.helpers.redis_server import RedisServer
from tests.helpers.waiting import fetch, queued

SECONDS = 10.0


@pytest.fixture
async def client(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncProducer]:
    """A client that looks again by time only after longer than any test waits."""
    monkeypatch.setattr(connection_module, "LONGEST_BLOCK_SECONDS", 6 * SECONDS)
    announce(connection)
    async with AsyncProducer(f"{redis_url}?socket_timeout={12 * SECONDS}") as client:
        yield client


def started(connection: redis.Redis, job: AsyncJobHandle) -> FakeWorker:
    worker = FakeWorker(connection, job.id)
    worker.start()
    return worker


def clients(connection: redis.Redis, command: str | None = None) -> int:
    """The number of the server's clients, or of those whose last command is this one."""
    return sum(client["cmd"] == command or not command for client in connection.client_list())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def looks() -> None:
    """Time in which those who wait look several times."""
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("sync", "other"), [(Producer, AsyncProducer), (JobHandle, AsyncJobHandle)]
)
def test_both_clients_have_the_same_methods(sync: type, other: type) -> None:
    bulk = {"run", "batch", "find_batch"}

    def methods(kind: type) -> set[str]:
        found = {name for name, member in vars(kind).items() if isfunction(member)}
        return found - {"_queue"} - bulk

    assert {name for name in methods(sync) if name[0] != "_"} == {
        name for name in methods(other) if name[0] != "_"
    }


async def test_a_job_is_submitted_streamed_and_awaited(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    job = await client.submit(prompt="def f():", temperature=0)
    assert (await job.state()).status == "queued"
    worker = started(connection, job)
    worker.step("hello")
    waiting = asyncio.create_task(job.result())
    async with job.stream() as stream:
        assert (await anext(stream)).n == 1
        body = worker.finish()
        assert (await anext(stream)).type == "done"
    completion = await waiting
    assert (completion, completion.text) == (body, "hello")
    assert await job.cancel() == "over"
    assert list(await client.models()) == ["demo"]


async def test_the_text_of_a_job_comes_as_it_is_written(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    job = await client.submit(prompt="def f():")
    worker = started(connection, job)
    texts = job.text()
    worker.step("Once")
    assert await anext(texts) == "Once"
    worker.step(" upon")
    worker.finish()
    assert [text async for text in texts] == [" upon"]


async def test_submissions_at_once_each_have_their_job(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    jobs = await asyncio.gather(*(client.submit(prompt=str(n)) for n in range(100)))
    prompts = [fetch(connection, job.id).kwargs["request"]["prompt"] for job in jobs]
    assert prompts == [str(n) for n in range(100)]
    assert sorted(queued(connection)) == sorted(job.id for job in jobs)


async def test_an_invalid_request_is_refused(client: AsyncProducer) -> None:
    with pytest.raises(InvalidRequest, match="temperature: got 9"):
        await client.submit(prompt="x", temperature=9)
    with pytest.raises(InvalidRequest, match="request 1: "):
        await client.submit_many([{"prompt": "x"}, {"promt": "x"}])


@pytest.mark.slow
async def test_a_thousand_jobs_are_awaited_at_once(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    jobs = await client.submit_many({"prompt": str(number)} for number in range(1000))
    before = clients(connection), threading.active_count()
    waiting = [asyncio.create_task(job.result()) for job in jobs]
    await looks()
    assert clients(connection) - before[0] <= 10
    assert threading.active_count() == before[1]
    bodies = {}
    for job in jobs:
        bodies[job.id] = FakeWorker(connection, job.id).finish()
        await asyncio.sleep(0)
    results = await asyncio.gather(*waiting)
    assert results == [bodies[job.id] for job in jobs]


async def test_a_wait_that_begins_during_another_is_served(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    slow, quick = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    waiting = asyncio.create_task(slow.result())
    await looks()
    second = asyncio.create_task(quick.result())
    await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        body = started(connection, quick).finish()
        assert await second == body
        body = started(connection, slow).finish()
        assert await waiting == body


async def test_two_waits_for_one_job_both_end(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    job = await client.submit(prompt="x")
    waiting = [asyncio.create_task(job.result()) for _ in range(2)]
    await looks()
    waiting.append(asyncio.create_task(job.result()))
    body = started(connection, job).finish()
    assert await asyncio.gather(*waiting) == [body] * 3


async def test_cancelled_waits_leave_no_task(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    jobs = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    tasks = asyncio.all_tasks()
    waiting = [asyncio.create_task(job.result()) for job in jobs]
    await looks()
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    waiting[1].cancel()
    await until(lambda: asyncio.all_tasks() == tasks)
    # The connection serves the next wait.
    body = started(connection, jobs[0]).finish()
    assert await jobs[0].result() == body


async def test_a_cancelled_wait_does_not_delay_the_next_one(
    client: AsyncProducer,
) -> None:
    job = await client.submit(prompt="x")
    async with asyncio.timeout(SECONDS):
        for turns in range(20):
            waiting = asyncio.create_task(job.result())
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(JobTimeout):
                await job.result(timeout=0)


async def test_a_wait_ends_whenever_it_is_cancelled(client: AsyncProducer) -> None:
    job = await client.submit(prompt="x")
    for turns in range(0, 60, 2):
        for wait in (job.result(), anext(job.stream())):
            waiting = asyncio.ensure_future(wait)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting}, timeout=SECONDS)
            assert waiting.cancelled()


async def test_a_wait_that_begins_while_the_last_one_leaves_is_served(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    job, other = await client.submit_many([{"prompt": "x"}, {"prompt": "y"}])
    done = started(connection, other).finish()
    for ticks in range(1, 8):
        leaving = asyncio.create_task(job.result())
        await looks()
        leaving.cancel()
        for _ in range(ticks):
            await asyncio.sleep(0)
        assert await other.result(timeout=SECONDS) == done
        await until(leaving.done)


async def test_closing_leaves_no_connection(redis_url: str, connection: redis.Redis) -> None:
    announce(connection)
    before = clients(connection)
    client = AsyncProducer(redis_url)
    job = await client.submit(prompt="x")
    waiting = asyncio.create_task(job.result())
    await looks()
    await client.close()
    with pytest.raises(OmlxQueueError, match="closed while a job was waited for"):
        await waiting
    await until(lambda: clients(connection) == before)


async def test_a_result_that_does_not_come_times_out(
    client: AsyncProducer, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FIRST_LOOK_SECONDS", 60.0)
    job = await client.submit(prompt="x")
    for timeout in (0, 0.05):
        with pytest.raises(JobTimeout, match=f"{job.id} did not finish within {timeout:g} s"):
            await job.result(timeout)
    body = started(connection, job).finish()
    assert await job.result(timeout=0) == body


@pytest.mark.parametrize("timeout", [0, 1])
async def test_a_timeout_passes_while_the_server_hangs(
    private_server: RedisServer, timeout: float
) -> None:
    assert private_server.process
    async with AsyncProducer(private_server.url) as client:
        job = await client.submit(model="m", prompt="x", require_known_model=False)
        private_server.process.send_signal(signal.SIGSTOP)
        try:
            # redis-py waits five seconds for an answer, and tries again.
            async with asyncio.timeout(4):
                with pytest.raises(JobTimeout):
                    await job.result(timeout)
        finally:
            private_server.process.send_signal(signal.SIGCONT)


Ending = Callable[[FakeWorker], Any]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda worker: worker.fail("out of memory"), JobFailed),
        (lambda worker: worker.stop("on request"), JobCancelled),
        (lambda worker: worker.connection.delete(worker.job.key), UnknownJob),
        (lambda worker: worker.finish(body={"choices": []}), MalformedResult),
    ],
)
async def test_every_end_has_its_error(
    client: AsyncProducer, connection: redis.Redis, end: Ending, error: type[Exception]
) -> None:
    job, other = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    end(started(connection, job))
    waiting = asyncio.create_task(other.result())
    with pytest.raises(error):
        await job.result(timeout=SECONDS)
    assert not waiting.done()
    body = started(connection, other).finish()
    assert await waiting == body


async def test_another_client_waits_for_the_same_jobs(
    redis_url: str, connection: redis.Redis, client: AsyncProducer
) -> None:
    jobs = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    with Producer(redis_url) as other, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(other.result, job.id, SECONDS) for job in jobs]
        await until(lambda: connection.info("clients")["blocked_clients"] == 2)
        bodies = [started(connection, job).finish() for job in jobs]
        assert [each.result() for each in waiting] == bodies


async def test_an_id_that_no_key_can_have_ends_its_own_wait_only(
    connection: redis.Redis, client: AsyncProducer
) -> None:
    good = await client.submit(prompt="a")
    wait = asyncio.create_task(good.result(timeout=SECONDS))
    await looks()
    with pytest.raises(UnknownJob):
        await client.result("\ud800", timeout=SECONDS)
    started(connection, good).finish()
    assert await wait


async def test_a_job_with_a_broken_key_ends_its_own_wait_only(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    good, broken = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
    waits = [asyncio.create_task(job.result(timeout=SECONDS)) for job in (good, broken)]
    await looks()
    connection.set(fetch(connection, broken.id).key, "a text")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await waits[1]
    body = started(connection, good).finish()
    assert await waits[0] == body


async def test_a_wait_that_begins_looks_at_its_own_job_alone(
    client: AsyncProducer, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_SECONDS", 6 * SECONDS)
    many = await client.submit_many({"prompt": str(number)} for number in range(50))
    last = await client.submit(prompt="x")
    body = started(connection, last).finish()
    waiting = [asyncio.create_task(job.result()) for job in many]
    await looks()
    before = connection.info("commandstats")["cmdstat_hget"]["calls"]
    assert await last.result() == body
    assert connection.info("commandstats")["cmdstat_hget"]["calls"] - before < 10
    for wait in waiting:
        wait.cancel()


async def test_a_job_cancelled_by_another_tool_is_noticed(
    client: AsyncProducer, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's own cancel writes no result and so wakes nobody."""
    job = await client.submit(prompt="x")
    waiting = asyncio.create_task(job.result())
    await looks()
    fetch(connection, job.id).cancel()
    with pytest.raises(JobCancelled):
        await asyncio.wait_for(waiting, SECONDS)


async def test_the_result_of_an_earlier_run_does_not_end_the_wait(
    client: AsyncProducer, connection: redis.Redis
) -> None:
    job = await client.submit(prompt="x")
    worker = started(connection, job)
    worker.fail("first run", event=False)
    connection.hset(worker.job.key, "status", "queued")
    waiting = asyncio.create_task(job.result())
    await looks()
    assert connection.xlen(results_key(job.id)) == 1
    body = worker.finish()
    assert await asyncio.wait_for(waiting, SECONDS) == body


async def test_a_server_that_stays_away_ends_the_waits(
    private_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "Reconnection", lambda: Reconnection(0.5))
    with redis.Redis.from_url(private_server.url) as connection:
        announce(connection)
        async with AsyncProducer(private_server.url) as client:
            jobs = await client.submit_many([{"prompt": "a"}, {"prompt": "b"}])
            waiting: list[Awaitable[Any]] = [asyncio.create_task(job.result()) for job in jobs]
            await looks()
            private_server.kill()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(end, redis.ConnectionError) for end in ends)
