"""Whoever reads tokens, slowly or not at all: the worker makes the same steps."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis

from omlx_producer.wire import events_key, tokens_channel
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    run_burst,
    running_worker,
    status,
    wait_for,
)

TOKENS = 400


@contextmanager
def deaf_subscriber(server: RedisServer, job_id: str) -> Iterator[socket.socket]:
    """A consumer that subscribes and then reads nothing, with a buffer that is soon full."""
    with socket.socket() as consumer:
        consumer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        consumer.connect(("127.0.0.1", server.port))
        consumer.sendall(f"SUBSCRIBE {tokens_channel(job_id)}\r\n".encode())
        consumer.recv(64)
        yield consumer


def steps_of(server: RedisServer) -> int:
    """Serve what is queued; how many decode steps that took."""
    with running_worker(server.url, burst=True) as worker:
        worker.test_thread.join(60)
    assert not worker.test_errors
    return worker.decode_thread.counters.steps


def test_a_consumer_that_reads_nothing_costs_no_step(private_server: RedisServer) -> None:
    with Redis.from_url(private_server.url) as connection:
        connection.config_set("client-output-buffer-limit", "pubsub 8kb 8kb 1")
        listened_to = enqueue(connection, max_completion_tokens=TOKENS, seed=1)
        with deaf_subscriber(private_server, listened_to.id):
            heard_by = connection.pubsub_numsub(tokens_channel(listened_to.id))
            assert heard_by == [(tokens_channel(listened_to.id).encode(), 1)]
            steps = steps_of(private_server)
        alone = enqueue(connection, max_completion_tokens=TOKENS, seed=1)
        assert steps_of(private_server) == steps
        for job in (listened_to, alone):
            assert status(job) == "finished"
        assert alone.return_value()["choices"] == listened_to.return_value()["choices"]


def test_a_stream_holds_the_whole_job_and_no_more_entries_than_tokens(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, f"p{i}", max_completion_tokens=TOKENS) for i in range(3)]
    run_burst(redis_url)
    for job in jobs:
        produced = job.return_value()["usage"]["completion_tokens"]
        # One for each step at most, one for text held back, one for the end.
        assert connection.xlen(events_key(job.id)) <= produced + 2
        assert events(connection, job.id)[0].since == 0


def test_a_stream_expires_with_the_result_and_without_one_by_itself(
    redis_url: str, connection: Redis
) -> None:
    kept = enqueue(connection, result_ttl=120)
    unfinished = enqueue(connection, max_completion_tokens=5000)
    with running_worker(redis_url, step_seconds=0.005):
        wait_for(lambda: is_over(kept) and connection.xlen(events_key(unfinished.id)) > 3)
    assert 0 < connection.ttl(events_key(kept.id)) <= 120
    assert 120 < connection.ttl(events_key(unfinished.id)) <= 86_400
