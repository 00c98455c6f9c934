"""Requests are checked, then enqueued as RQ jobs: all or none, once, in order."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import fakeredis
import pytest
import redis
from redis.connection import Connection

from omlx_producer import (
    GenerationRequest,
    InvalidRequest,
    Producer,
)
from omlx_producer.producer import CHUNK
from omlx_producer.wire import JOB_FUNCTION, MODELS_KEY, wake_channel
from tests.helpers.fake_worker import announce, sign_on
from tests.helpers.waiting import fetch, queued


def nothing_enqueued(connection: redis.Redis) -> bool:
    return not list(connection.scan_iter("rq:job:*"))


def test_a_job_is_an_rq_job_of_the_function_by_name(
    connection: redis.Redis, producer: Producer
) -> None:
    handle = producer.submit(prompt="def fibonacci(n):", temperature=0)
    job = fetch(connection, handle.id)
    assert job.func_name == JOB_FUNCTION
    assert not job.args
    request = {"model": "demo", "prompt": "def fibonacci(n):", "temperature": 0.0}
    assert job.kwargs == {"request": request}
    assert job.origin == handle.queue == "omlx:demo:default"
    assert (job.timeout, job.result_ttl) == (3600, 24 * 3600)
    assert queued(connection) == [handle.id]
    assert handle.id.isalnum()
    # JSON and nothing else: what is stored can be read without unpickling.
    assert json.loads(job.data)[0] == JOB_FUNCTION


def test_a_model_is_live_while_a_worker_serves_it(
    connection: redis.Redis, producer: Producer
) -> None:
    assert (list(producer.models()), list(producer.models(live=True))) == (["demo"], [])
    sign_on(connection, "w1")
    assert list(producer.models(live=True)) == ["demo"]


def test_the_limits_of_a_job_can_be_set(connection: redis.Redis, producer: Producer) -> None:
    handle = producer.submit(prompt="x", job_timeout=5, result_ttl=6, failure_ttl=7)
    job = fetch(connection, handle.id)
    assert (job.timeout, job.result_ttl, job.failure_ttl) == (5, 6, 7)


def test_the_priority_chooses_the_queue(connection: redis.Redis, producer: Producer) -> None:
    for priority in ("high", "default", "bulk"):
        handle = producer.submit(prompt="x", priority=priority)
        assert queued(connection, f"omlx:demo:{priority}") == [handle.id]


def test_submitting_rings_for_the_workers(connection: redis.Redis, producer: Producer) -> None:
    with connection.pubsub() as pubsub:
        pubsub.subscribe(wake_channel("demo"))
        assert pubsub.get_message(timeout=1)["type"] == "subscribe"
        producer.submit(prompt="x")
        assert pubsub.get_message(timeout=1)["type"] == "message"


def test_a_request_may_be_a_model_or_a_mapping(producer: Producer) -> None:
    assert producer.submit(GenerationRequest(model="demo", prompt="x")).id
    assert producer.submit({"prompt": "x"}).id
    with pytest.raises(TypeError):
        producer.submit({"prompt": "x"}, temperature=0)


def test_dashboards_see_a_short_description(connection: redis.Redis, producer: Producer) -> None:
    def description(**fields: Any) -> str | None:
        return fetch(connection, producer.submit(**fields).id).description

    assert description(prompt="a\nb " * 100) == "demo: " + " ".join(["a b"] * 10)
    assert description(prompt=[1, 2, 3]) == "demo: 3 tokens"
    assert description(prompt=[1]) == "demo: 1 token"
    assert description(messages=[{"role": "user", "content": "hi"}]) == "demo: hi"


def test_many_jobs_keep_their_order_across_chunks(
    connection: redis.Redis, producer: Producer
) -> None:
    announce(connection, "other")
    count = 2 * CHUNK + 3
    requests = [
        {"model": "other" if number % 10 == 9 else "demo", "prompt": str(number)}
        for number in range(count)
    ]
    handles = producer.submit_many(requests, priority="bulk")
    assert len({handle.id for handle in handles}) == count
    for queue in ("omlx:demo:bulk", "omlx:other:bulk"):
        expected = [handle.id for handle in handles if handle.queue == queue]
        assert queued(connection, queue) == expected
    last = fetch(connection, handles[-1].id)
    assert last.kwargs["request"]["prompt"] == str(count - 1)


def test_one_bad_request_of_many_keeps_all_out(connection: redis.Redis, producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match=r"^request 2: temperature: got 9; "):
        producer.submit_many([{"prompt": "x"}] * 2 + [{"prompt": "x", "temperature": 9}])
    assert nothing_enqueued(connection)


def test_nothing_to_submit_is_fine(producer: Producer) -> None:
    assert producer.submit_many([]) == []


@pytest.mark.parametrize("lost", ["answer", "question"])
def test_a_connection_lost_while_enqueuing_enqueues_once(
    connection: redis.Redis, producer: Producer, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    send, cuts = Connection.send_packed_command, []

    def cut_first_exec(self: Connection, command: Any, check_health: bool = True) -> None:
        is_exec = any(b"EXEC" in part for part in command)
        if is_exec and not cuts and lost == "question":
            cuts.append(self._sock.shutdown(socket.SHUT_RDWR))
        send(self, command, check_health)
        if is_exec and not cuts:
            assert self._sock.recv(1 << 16)
            cuts.append(self._sock.shutdown(socket.SHUT_RDWR))

    monkeypatch.setattr(Connection, "send_packed_command", cut_first_exec)
    handle = producer.submit(prompt="x")
    assert len(cuts) == 1
    assert queued(connection) == [handle.id]


def test_the_only_model_is_the_default(producer: Producer) -> None:
    assert producer.submit(prompt="x").queue == "omlx:demo:default"


def test_without_any_model_one_must_be_started_or_named(connection: redis.Redis) -> None:
    with pytest.raises(InvalidRequest, match=r"^model: missing, and no worker has announced one"):
        Producer(connection).submit(prompt="x")


def test_among_several_models_one_must_be_named(
    connection: redis.Redis, producer: Producer
) -> None:
    announce(connection, "other")
    with pytest.raises(InvalidRequest, match=r"several; give one of demo, other$"):
        producer.submit(prompt="x")


def test_a_model_of_text_and_one_of_vectors_each_have_their_own_requests(
    connection: redis.Redis, producer: Producer
) -> None:
    announce(connection, "vectors", at=1e9 + 3600, vector_size=4)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    jobs = producer.submit_many([{"prompt": "x"}, {"input": "x"}, chat])
    assert [job.queue.split(":")[1] for job in jobs] == ["demo", "vectors", "demo"]
    announce(connection, "more-vectors", at=1e9 + 3600, vector_size=4)
    with pytest.raises(InvalidRequest, match=r"several; give one of more-vectors, vectors$"):
        producer.embed(["x"])


def test_of_several_models_the_only_one_that_is_still_served_is_the_default(
    connection: redis.Redis, producer: Producer
) -> None:
    announce(connection, "other", at=1e9 + 3600)
    assert producer.submit(prompt="x").queue == "omlx:other:default"


def test_an_unknown_model_is_refused_with_the_known_ones(
    connection: redis.Redis, producer: Producer
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        producer.submit(model="dmeo", prompt="x")
    assert str(caught.value) == (
        "model: got 'dmeo', which no worker has announced (known: demo); start a worker with "
        "omlx-worker run -m MODEL --model-alias dmeo, or pass require_known_model=False"
    )
    assert nothing_enqueued(connection)
    assert producer.submit(model="dmeo", prompt="x", require_known_model=False).id


def test_an_entry_that_is_no_model_is_passed_over(
    connection: redis.Redis, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    connection.hset(MODELS_KEY, "broken", "{")
    newer = {"model": "m", "context_length": 5, "longest_token": 2, "family": "new"}
    connection.hset(MODELS_KEY, "newer", json.dumps(newer))
    with caplog.at_level(logging.WARNING):
        assert list(producer.models()) == ["demo", "newer"]
    assert "broken" in caplog.text


def test_a_prompt_certainly_longer_than_the_context_is_refused(
    connection: redis.Redis, producer: Producer
) -> None:
    announce(connection, context=10, longest=4)
    producer.submit(prompt="x" * 40)
    producer.submit(prompt=[1] * 10)
    before = queued(connection)
    with pytest.raises(InvalidRequest) as caught:
        producer.submit(prompt="x" * 41)
    assert str(caught.value) == (
        "prompt: got 41 characters, which are at least 11 tokens; "
        "give at most the 10 tokens of the context of demo"
    )
    with pytest.raises(InvalidRequest, match=r"^prompt: got 11 tokens; "):
        producer.submit(prompt=[1] * 11)
    with pytest.raises(InvalidRequest, match=r"^messages: got 50 characters, "):
        producer.submit(messages=[{"role": "user", "content": "x" * 50}])
    assert queued(connection) == before


def test_a_priority_that_does_not_exist_is_refused(producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match=r"priority: got 'low'; give high, default, bulk"):
        producer.submit(prompt="x", priority="low")  # type: ignore[arg-type]


def test_checks_need_no_real_server() -> None:
    connection = fakeredis.FakeRedis()
    announce(connection)
    assert Producer(connection).models()["demo"].context_length == 1024
    with pytest.raises(InvalidRequest):
        Producer(connection).submit(prompt="")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"job_timeout": 0}, "job_timeout: got 0; give whole seconds from 1 on"),
        ({"job_timeout": "abc"}, "job_timeout: got 'abc'; give whole seconds from 1 on"),
        ({"result_ttl": -5}, "result_ttl: got -5; give whole seconds from 1 on, or -1"),
        ({"failure_ttl": 1.5}, "failure_ttl: got 1.5; give whole seconds from 1 on, or -1"),
    ],
)
def test_a_limit_that_is_none_is_refused(
    connection: redis.Redis, producer: Producer, limit: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        producer.submit(prompt="x", **limit)
    assert str(caught.value) == reason
    assert queued(connection) == []
