"""Redis goes away and comes back: the worker neither dies nor loses or repeats a token."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import (
    RedisError,
    ResponseError,
    TimeoutError,
)
from rq.job import Job

from omlx_producer.wire import PromptLogprob, TokenLogprob
from omlx_worker.connection import connect
from omlx_worker.control.worker import RedisGone
from omlx_worker.delivery.outbox import Outbox
from omlx_worker.engine.rows.emission import Emission
from tests.helpers.redis_server import RedisServer, redis_server
from tests.helpers.workers import enqueue, events, is_over, running_worker, streamed_text, wait_for


@pytest.fixture
def durable() -> Iterator[RedisServer]:
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def all_over(url: str, jobs: list[Job]) -> bool:
    try:
        return all(map(is_over, jobs))
    except RedisError:
        return False


def test_a_worker_reaches_its_server_through_a_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server("--unixsocket", str(path)), connect(f"unix://{path}") as connection:
        assert connection.ping()


def test_jobs_in_flight_survive_a_restart_of_the_server(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection:
        jobs = [enqueue(connection, f"p{i}", max_completion_tokens=80) for i in range(6)]
        with running_worker(durable.url, max_rows=4, step_seconds=0.01) as worker:
            wait_for(lambda: all(len(events(connection, job.id)) > 3 for job in jobs[:4]))
            durable.kill()
            time.sleep(0.5)
            assert worker.test_thread.is_alive()
            durable.start()
            wait_for(lambda: all_over(durable.url, jobs), 30)
        for job in jobs:
            assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
            assert len(job.results()) == 1


@pytest.mark.slow
def test_an_idle_worker_serves_again_after_a_restart(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection, running_worker(durable.url) as worker:
        job = enqueue(connection)
        wait_for(lambda: is_over(job))
        durable.stop()
        time.sleep(0.3)
        assert worker.test_thread.is_alive()
        durable.start()
        later = enqueue(connection)
        wait_for(lambda: is_over(later), 30)


@pytest.mark.slow
def test_an_outage_is_told_once_and_its_end_too(
    durable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_worker(durable.url) as worker:
        wait_for(lambda: worker.birth_date is not None)
        durable.stop()
        wait_for(lambda: worker._outage.seconds > 1)
        durable.start()
        wait_for(lambda: not worker._outage.seconds)

    said = [r.getMessage() for r in caplog.records if r.name == "omlx_worker.worker"]
    told = [message for message in said if message.startswith("Redis is")]
    assert [message.split()[2] for message in told] == ["unavailable", "back"]


def test_a_worker_can_be_stopped_while_redis_is_away(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection:
        job = enqueue(connection, max_completion_tokens=5000)
        with running_worker(durable.url, step_seconds=0.01) as worker:
            wait_for(lambda: len(events(connection, job.id)) > 3)
            durable.kill()
            worker.stop()
            worker.stop()
            worker.test_thread.join(20)
            assert not worker.test_thread.is_alive()


def test_an_idle_worker_that_is_told_to_stop_while_redis_is_away_does_not_wait(
    durable: RedisServer,
) -> None:
    with running_worker(durable.url, drain_timeout=600) as worker:
        wait_for(lambda: worker.birth_date is not None)
        durable.kill()
        wait_for(lambda: worker._outage.seconds)
        worker.stop()
        worker.test_thread.join(20)
        assert not worker.test_thread.is_alive()


@pytest.fixture
def small_outbox(monkeypatch: pytest.MonkeyPatch) -> int:
    """Workers with room for so many tokens that Redis has not taken."""
    limit = 60
    monkeypatch.setattr("omlx_worker.decode.thread.Outbox", lambda: Outbox(limit))
    return limit


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """A server that takes connections and answers nobody."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_decoding_goes_on_while_redis_does_not_answer(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection:
        job = enqueue(connection, max_completion_tokens=300)
        with running_worker(durable.url, step_seconds=0.005) as worker:
            wait_for(lambda: len(events(connection, job.id)) > 3)
            with frozen(durable):
                stopped_at = worker.decode_thread.counters.tokens
                wait_for(lambda: worker.decode_thread.counters.tokens > stopped_at + 100)
            wait_for(lambda: is_over(job))
        assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
        # What waited went out at once.
        assert len(events(connection, job.id)) < 250


def test_decoding_pauses_when_the_outbox_is_full_and_goes_on_when_it_is_not(
    durable: RedisServer, small_outbox: int
) -> None:
    with Redis.from_url(durable.url) as connection:
        jobs = [enqueue(connection, f"p{i}", max_completion_tokens=200) for i in range(3)]
        with running_worker(durable.url, step_seconds=0.002) as worker:
            outbox = worker.decode_thread.outbox
            wait_for(lambda: len(events(connection, jobs[0].id)) > 3)
            durable.kill()
            wait_for(lambda: not outbox.has_room)
            produced = worker.decode_thread.counters.tokens
            assert outbox.waiting < small_outbox + len(jobs)
            time.sleep(0.2)
            assert worker.decode_thread.counters.tokens <= produced + len(jobs)
            durable.start()
            wait_for(lambda: all_over(durable.url, jobs), 30)
            wait_for(lambda: outbox.waiting == 0)
        for job in jobs:
            assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
            assert len(job.results()) == 1


def test_a_paused_worker_still_listens(durable: RedisServer, small_outbox: int) -> None:
    with Redis.from_url(durable.url) as connection:
        job = enqueue(connection, max_completion_tokens=5000)
        with running_worker(durable.url, step_seconds=0.002) as worker:
            wait_for(lambda: len(events(connection, job.id)) > 3)
            durable.kill()
            wait_for(lambda: not worker.decode_thread.outbox.has_room)
            worker.stop()
            worker.stop()
            worker.test_thread.join(20)
            assert not worker.test_thread.is_alive()


def test_alternatives_of_tokens_take_room_too() -> None:
    outbox = Outbox(limit=10)
    entry = TokenLogprob(token="a", token_id=1, logprob=-1.0, top=[("b", 2, -2.0)] * 4)
    emission = Emission("r", [1, 2], "ab", [entry, entry])
    outbox.add([emission])
    assert outbox.waiting == 10
    assert not outbox.has_room
    outbox.remove([emission])
    assert outbox.has_room


def test_so_do_scored_tokens_of_a_prompt() -> None:
    outbox = Outbox(limit=10)
    top = [("b", 2, -2.0)] * 4
    entry = PromptLogprob(token="a", token_id=1, logprob=-1.0, top=top, rank=9)
    emission = Emission("r", [], "", prompt_logprobs=[entry, entry])
    outbox.add([emission])
    assert outbox.waiting == 10
    outbox.remove([emission])
    assert outbox.waiting == 0


@pytest.mark.slow
def test_a_worker_gives_up_after_its_grace(durable: RedisServer) -> None:
    with running_worker(durable.url, redis_grace=0.5) as worker:
        wait_for(lambda: worker.birth_date is not None)
        durable.stop()
        worker.test_thread.join(20)
        assert not worker.test_thread.is_alive()
    assert [type(error) for error in worker.test_errors] == [RedisGone]
    assert worker.unreachable


def test_commands_are_heard_again_after_a_server_that_did_not_answer_in_time(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url) as worker:
        wait_for(lambda: worker.pubsub_thread is not None)
        thread = worker.pubsub_thread
        worker._pubsub_exception_handler(TimeoutError("no answer"), worker.pubsub, thread)
        assert thread._running.is_set()
        worker._pubsub_exception_handler(ResponseError("no such command"), worker.pubsub, thread)
        assert not thread._running.is_set()
