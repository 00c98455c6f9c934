"""Consumers of a real server see every token once: late, slow, cut off, or after the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio

from omlx_producer import (
    AsyncTokenStream,
    End,
    EndEvent,
    InvalidRequest,
    JobEvent,
    JobFailed,
    JobHandle,
    Producer,
    TokensEvent,
    TokensLost,
    TokenStream,
    UnknownJob,
)
from omlx_producer import connection as connection_module
from omlx_producer.wire import events_key
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.leases import roll_back
from tests.helpers.redis_server import RedisServer, cut_readers
from tests.helpers.workers import wait_for


def text_of(events: list[JobEvent]) -> str:
    return "".join(
        choice.text
        for event in events
        if isinstance(event, TokensEvent)
        for choice in event.choices
    )


def counts(events: list[JobEvent]) -> list[int]:
    return [event.n for event in events if isinstance(event, TokensEvent)]


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def quick_to_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "LONGEST_BLOCK_SECONDS", 0.1)


def run(worker: FakeWorker, steps: int = 200, pause: float = 0.002) -> None:
    for number in range(steps):
        worker.step(f"{number} ", tokens=1 + number % 3)
        time.sleep(pause)
    worker.finish()


def test_a_consumer_from_the_start_sees_every_token(job: JobHandle, worker: FakeWorker) -> None:
    thread = in_thread(lambda: run(worker))
    events = list(job.stream())
    thread.join()
    assert text_of(events) == worker.texts[0]
    assert isinstance(events[-1], EndEvent)


def test_the_text_of_a_job_comes_as_it_is_written(job: JobHandle, worker: FakeWorker) -> None:
    texts = job.text()
    for word in ("Once", " upon", " a time"):
        worker.step(word)
        assert next(texts) == word
    worker.finish()
    assert list(texts) == []


def test_the_text_of_a_job_without_a_stream_comes_at_its_end(
    job: JobHandle, worker: FakeWorker
) -> None:
    worker.texts[0] = "short"
    worker.finish(n=1)
    assert list(job.text()) == ["short"]


def test_the_text_of_a_failed_job_ends_with_its_error(job: JobHandle, worker: FakeWorker) -> None:
    texts = job.text()
    worker.step("Once")
    worker.fail("the device was lost")
    assert next(texts) == "Once"
    with pytest.raises(JobFailed, match="the device was lost"):
        next(texts)


def test_a_late_consumer_sees_every_token_once(job: JobHandle, worker: FakeWorker) -> None:
    for number in range(50):
        worker.step(f"{number} ")
    follow = job.stream()
    early = [next(follow) for _ in range(10)]
    thread = in_thread(lambda: run(worker, 50))
    events = early + list(follow)
    thread.join()
    assert text_of(events) == worker.texts[0]


def test_a_stream_longer_than_a_page_is_read_whole(job: JobHandle, worker: FakeWorker) -> None:
    for number in range(1234):
        worker.step(f"{number} ")
    worker.finish()
    assert text_of(list(job.stream())) == worker.texts[0]


def test_a_cursor_resumes_after_what_was_had(job: JobHandle, worker: FakeWorker) -> None:
    for number in range(5):
        worker.step(f"{number} ", tokens=2)
    worker.finish()
    follow = job.stream()
    had = [next(follow), next(follow)]
    follow.close()
    assert follow.cursor == 4
    assert text_of(had + list(job.stream(follow.cursor))) == "0 1 2 3 4 "


@pytest.mark.parametrize("cursor", [3, 12, 1000])
def test_a_cursor_at_which_no_event_ends_is_refused(
    job: JobHandle, worker: FakeWorker, cursor: int
) -> None:
    for number in range(5):
        worker.step(f"{number} ", tokens=2)
    worker.finish()
    with pytest.raises(TokensLost, match=f"no event of job {job.id} ends with token {cursor}"):
        list(job.stream(cursor))


def test_a_negative_cursor_is_refused(redis_url: str, job: JobHandle) -> None:
    with pytest.raises(InvalidRequest, match=r"^cursor: got -1; give "):
        job.stream(-1)
    with pytest.raises(ValueError, match=r"^cursor: got -1; give "):
        AsyncTokenStream(redis_url, job.id, -1)


def cut(connection: redis.Redis, until: threading.Event) -> None:
    while not until.is_set():
        cut_readers(connection)
        time.sleep(0.02)


@pytest.fixture
def cutter(connection: redis.Redis) -> Iterator[None]:
    """Cuts every blocking read fifty times a second."""
    stop = threading.Event()
    thread = in_thread(lambda: cut(connection, stop))
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("cutter")
def test_a_consumer_cut_off_again_and_again_sees_every_token_once(
    job: JobHandle, worker: FakeWorker
) -> None:
    thread = in_thread(lambda: run(worker, 400))
    events = list(job.stream())
    thread.join()
    assert counts(events) == sorted(set(counts(events)))
    assert text_of(events) == worker.texts[0]


@pytest.mark.usefixtures("cutter")
async def test_an_async_consumer_cut_off_again_and_again_sees_every_token_once(
    redis_url: str, job: JobHandle, worker: FakeWorker
) -> None:
    thread = in_thread(lambda: run(worker, 400))
    async with AsyncTokenStream(redis_url, job.id) as follow:
        events = [event async for event in follow]
    await asyncio.to_thread(thread.join)
    assert counts(events) == sorted(set(counts(events)))
    assert text_of(events) == worker.texts[0]


def test_a_consumer_cut_off_before_the_last_events_is_not_left_waiting(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    """Nothing is published after the reconnection: its confirmation alone must do."""
    worker.step("a")
    follow = job.stream()
    assert text_of([next(follow)]) == "a"
    cut_readers(connection)
    worker.step("b")
    worker.finish()
    began = time.monotonic()
    assert text_of(list(follow)) == "b"
    assert time.monotonic() - began < connection_module.LONGEST_BLOCK_SECONDS / 2


def test_streams_in_threads_have_a_connection_each(
    redis_url: str, connection: redis.Redis, producer: Producer
) -> None:
    streams = 50
    jobs = producer.submit_many([{"prompt": "x"}] * streams)
    workers = [FakeWorker(connection, job.id) for job in jobs]
    for worker in workers:
        worker.step("a")
    before = len(connection.client_list())
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(streams) as pool:
        reading = [pool.submit(lambda job=job: list(TokenStream(client, job.id))) for job in jobs]
        wait_for(lambda: blocked(connection) == streams)
        assert len(connection.client_list()) - before <= streams
        for worker in workers:
            worker.step("b")
            worker.finish()
        assert {text_of(each.result()) for each in reading} == {"ab"}
        assert blocked(connection) == 0


async def test_many_async_consumers_share_one_client(
    redis_url: str, job: JobHandle, worker: FakeWorker
) -> None:
    async def consume(client: redis.asyncio.Redis) -> str:
        return text_of([event async for event in AsyncTokenStream(client, job.id)])

    thread = in_thread(lambda: run(worker))
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        texts = await asyncio.gather(*(consume(client) for _ in range(5)))
    await asyncio.to_thread(thread.join)
    assert texts == [worker.texts[0]] * 5


def lose_and_go_on(connection: redis.Redis, worker: FakeWorker) -> None:
    """The server loses all but the first event; another worker goes on and joins two of them."""
    roll_back(connection, events_key(worker.job_id), 1)
    cut_readers(connection)
    worker.go_on_from("a ", 1)
    worker.step("b ")
    worker.step("c d ", tokens=2)
    worker.finish()


def test_an_event_that_overlaps_what_was_had_is_trimmed(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    for text in ("a ", "b ", "c "):
        worker.step(text)
    follow = job.stream()
    events = [next(follow) for _ in range(3)]
    lose_and_go_on(connection, worker)
    assert text_of(events + list(follow)) == "a b c d "


async def test_an_event_that_overlaps_what_an_async_consumer_had_is_trimmed(
    redis_url: str, connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    for text in ("a ", "b ", "c "):
        worker.step(text)
    async with AsyncTokenStream(redis_url, job.id) as follow:
        events = [await anext(follow) for _ in range(3)]
        lose_and_go_on(connection, worker)
        events += [event async for event in follow]
    assert text_of(events) == "a b c d "


async def test_an_async_consumer_does_not_wait_for_one_that_had_more_before_a_loss(
    redis_url: str, connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    for text in ("a ", "b ", "c "):
        worker.step(text)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        first, second = AsyncTokenStream(client, job.id), AsyncTokenStream(client, job.id)
        for _ in range(3):
            await anext(first)
        ahead = asyncio.ensure_future(anext(first))
        while blocked(connection) == 0:
            await asyncio.sleep(0.01)
        roll_back(connection, events_key(job.id), 1)
        assert text_of([await anext(second)]) == "a "
        behind = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0.1)
        worker.go_on_from("a ", 1)
        worker.step("b ")
        async with asyncio.timeout(connection_module.LONGEST_BLOCK_SECONDS / 2):
            assert text_of([await behind]) == "b "
        for text in ("c ", "d "):
            worker.step(text)
        assert text_of([await ahead]) == "d "
        await first.aclose()
        await second.aclose()


@pytest.mark.slow
def test_a_consumer_outlives_a_restart_of_the_server(private_server: RedisServer) -> None:
    private_server.stop()
    private_server.options = ("--appendonly", "yes")
    private_server.start()
    with redis.Redis.from_url(private_server.url) as connection:
        job = Producer(connection).submit(model="m", prompt="x", require_known_model=False)
        worker = FakeWorker(connection, job.id)
        worker.start()
        worker.step("before ")
        with TokenStream(private_server.url, job.id) as follow:
            events = [next(follow)]
            connection.config_set("appendfsync", "always")
            private_server.kill()
            thread = in_thread(lambda: (time.sleep(1.5), private_server.start())[0])
            rest: list[JobEvent] = []
            reader = in_thread(lambda: rest.extend(follow))
            thread.join()
            worker.step("after")
            worker.finish()
            reader.join()
    assert text_of(events + rest) == "before after"


def test_a_server_that_stays_away_ends_the_stream_with_its_error(
    private_server: RedisServer,
) -> None:
    with redis.Redis.from_url(private_server.url) as connection:
        job = Producer(connection).submit(model="m", prompt="x", require_known_model=False)
        worker = FakeWorker(connection, job.id)
        worker.start()
        worker.step("before")
    with TokenStream(private_server.url, job.id, reconnect_for=0.5) as follow:
        next(follow)
        private_server.kill()
        with pytest.raises(redis.ConnectionError):
            next(follow)


def test_a_job_that_publishes_nothing_ends_with_its_terminal_event(
    job: JobHandle, worker: FakeWorker
) -> None:
    thread = in_thread(lambda: (time.sleep(0.2), worker.finish(n=9))[0])
    (event,) = job.stream()
    thread.join()
    assert isinstance(event, EndEvent)
    assert event.n == 9


def test_an_expired_stream_still_tells_how_the_job_ended(
    connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    worker.step("a", tokens=2)
    worker.finish("length")
    connection.delete(events_key(job.id))
    (event,) = job.stream()
    assert isinstance(event, EndEvent)
    assert (event.n, event.finish_reasons, event.usage.completion_tokens) == (2, ["length"], 2)


@pytest.mark.usefixtures("quick_to_doubt")
def test_an_end_without_an_event_is_noticed(job: JobHandle, worker: FakeWorker) -> None:
    worker.step("a")
    thread = in_thread(lambda: (time.sleep(0.3), worker.fail("no memory", event=False))[0])
    events = list(job.stream())
    thread.join()
    assert text_of(events) == "a"
    assert events[-1] == EndEvent.of(job.id, 1, End("failed", "no memory"))


def test_a_failed_job_tells_why_at_once(job: JobHandle, worker: FakeWorker) -> None:
    worker.fail("no memory")
    assert list(job.stream()) == [EndEvent.of(job.id, 0, End("failed", "no memory"))]


def test_a_stopped_job_tells_so_at_once(job: JobHandle, worker: FakeWorker) -> None:
    worker.step("a")
    worker.stop()
    assert list(job.stream())[-1].type == "cancelled"


def test_an_unknown_job_is_told_at_once(producer: Producer) -> None:
    began = time.monotonic()
    with pytest.raises(UnknownJob, match="no job has the id 'nope'"):
        list(producer.stream("nope"))
    assert time.monotonic() - began < 1


async def test_an_unknown_job_is_told_at_once_to_an_async_consumer(redis_url: str) -> None:
    async with AsyncTokenStream(redis_url, "nope") as follow:
        with pytest.raises(UnknownJob):
            await anext(follow)


async def test_async_and_sync_consumers_see_the_same(
    redis_url: str, job: JobHandle, worker: FakeWorker
) -> None:
    run(worker, 20)
    async with AsyncTokenStream(redis_url, job.id, 3) as follow:
        assert [event async for event in follow] == list(job.stream(3))


def blocked(connection: redis.Redis) -> int:
    return int(connection.info("clients")["blocked_clients"])


async def test_an_async_consumer_that_leaves_early_leaves_no_read(
    redis_url: str, connection: redis.Redis, job: JobHandle, worker: FakeWorker
) -> None:
    worker.step("a")
    async with AsyncTokenStream(redis_url, job.id) as follow:
        await anext(follow)
        waiting = asyncio.ensure_future(anext(follow))
        while blocked(connection) == 0:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
    wait_for(lambda: blocked(connection) == 0)


@pytest.mark.parametrize("protocol", [2, 3])
async def test_streams_are_read_in_each_version_of_the_protocol(
    redis_url: str, job: JobHandle, worker: FakeWorker, protocol: int
) -> None:
    url = f"{redis_url}?protocol={protocol}"
    with TokenStream(url, job.id) as sync_one:
        async with AsyncTokenStream(url, job.id) as async_one:
            for text in ("a", "b", "c"):
                worker.step(text)
                assert text_of([next(sync_one)]) == text_of([await anext(async_one)]) == text


def test_a_client_that_decodes_is_refused(redis_url: str) -> None:
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as client,
        pytest.raises(ValueError, match="decode_responses"),
    ):
        TokenStream(client, "j")
