"""A request that is submitted twice with the same key becomes one job."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from omlx_producer import InvalidRequest, JobHandle, Producer
from omlx_producer.cli.main import cli
from omlx_producer.producer import CHUNK
from omlx_producer.wire import events_key
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.waiting import fetch, queued


@pytest.mark.parametrize(
    "request_fields",
    [
        {"prompt": "x"},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "x"}]},
        {"prompt": "x", "stop": ["a"], "logit_bias": {"1": 2}, "metadata": {"a": "b"}},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_the_second_submission_finds_the_job_that_waits(
    connection: redis.Redis, producer: Producer, request_fields: dict[str, Any]
) -> None:
    first, second = (producer.submit(**request_fields, idempotency_key="order 7") for _ in range(2))
    other = producer.submit(prompt="x", idempotency_key="order 8")
    assert first == second != other
    assert queued(connection) == [first.id, other.id]


@pytest.mark.parametrize("end", ["finish", "fail", "stop"])
def test_the_second_submission_finds_the_job_that_is_over(
    connection: redis.Redis, producer: Producer, end: str
) -> None:
    def submit() -> JobHandle:
        return producer.submit(prompt="x", idempotency_key="k")

    job = submit()
    worker = FakeWorker(connection, job.id)
    worker.start()
    assert submit().state().status == "started"
    worker.step("hello")
    getattr(worker, end)(*([] if end == "finish" else ["no"]))
    before = job.state()
    assert submit().state() == before
    assert [event.n for event in submit().stream()] == [1, 1]
    assert queued(connection) == []


def test_a_key_lives_as_long_as_its_job(connection: redis.Redis, producer: Producer) -> None:
    job = producer.submit(prompt="x", idempotency_key="k", result_ttl=100)
    worker = FakeWorker(connection, job.id)
    worker.start()
    worker.step("old")
    worker.finish()
    fetch(connection, job.id).delete()
    assert not list(connection.scan_iter("*idempot*"))
    again = producer.submit(prompt="x", idempotency_key="k")
    assert queued(connection) == [again.id]
    assert again.state().status == "queued"
    assert not connection.exists(events_key(job.id))
    worker.go_on_from("", 0)
    worker.start()
    worker.step("new")
    body = worker.finish()
    assert again.result() == body
    assert [choice.text for event in again.stream() if event.type == "tokens"
            for choice in event.choices] == ["new"]  # fmt: skip


def test_a_hundred_submissions_at_once_make_one_job(
    connection: redis.Redis, producer: Producer, redis_url: str
) -> None:
    start = threading.Barrier(20)
    ids: list[str] = []

    def submit() -> None:
        with Producer(redis_url) as own:
            own.models()
            start.wait(20)
            ids.extend(own.submit(prompt="x", idempotency_key="k").id for _ in range(5))

    threads = [threading.Thread(target=submit) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(ids) == 100
    assert queued(connection) == list(set(ids))


def test_many_requests_may_have_keys_and_the_same_one_twice(
    connection: redis.Redis, producer: Producer
) -> None:
    requests: list[Any] = [{"prompt": str(number % 400)} for number in range(CHUNK + 100)]
    keys = [None if number == 3 else f"row {number % 400}" for number in range(len(requests))]
    handles = producer.submit_many(requests, idempotency_keys=keys)
    waiting = queued(connection)
    assert len(waiting) == 401
    assert handles[0].id == handles[400].id == waiting[0]
    assert {handle.id for handle in handles} == set(waiting)
    producer.submit_many(requests[4:], idempotency_keys=keys[4:])
    assert queued(connection) == waiting
    for few in ([], ["one"]):
        with pytest.raises(InvalidRequest, match=f"got {len(few)}; give one for each of 2 req"):
            producer.submit_many(requests[:2], idempotency_keys=few)


def test_a_key_can_be_made_from_the_request(connection: redis.Redis, producer: Producer) -> None:
    first = producer.submit(prompt="x", temperature=0, seed=1, idempotent=True)
    assert producer.submit(seed=1, temperature=0.0, prompt="x", idempotent=True) == first
    assert producer.submit(prompt="x", temperature=0, seed=2, idempotent=True) != first
    salted = {"prompt": "x", "temperature": 0, "seed": 1, "cache_salt": "mine"}
    assert producer.submit(**salted, idempotent=True) != first, "a salt shares no job either"
    assert producer.submit(prompt="x", temperature=0, seed=1) != first


def test_a_key_with_another_request_is_refused(connection: redis.Redis, producer: Producer) -> None:
    job = producer.submit(prompt="x", idempotency_key="k")
    with pytest.raises(InvalidRequest, match=f"job {job.id} has the same key and another request"):
        producer.submit(prompt="y", idempotency_key="k")
    with pytest.raises(InvalidRequest, match="the same key and another request"):
        producer.submit_many([{"prompt": "x"}, {"prompt": "y"}], idempotency_keys=["new", "new"])
    assert queued(connection) == [job.id]


@pytest.mark.parametrize("first", ["submitted before", "in the same call"])
def test_a_taken_key_behind_many_requests_enqueues_none_of_them(
    connection: redis.Redis, producer: Producer, first: str
) -> None:
    requests: list[Any] = [{"prompt": str(number)} for number in range(CHUNK + 1)]
    keys: list[str | None] = [None] * CHUNK + ["k"]
    if first == "submitted before":
        producer.submit(prompt="x", idempotency_key="k")
    else:
        keys[0] = "k"
    before = queued(connection)
    with pytest.raises(InvalidRequest, match="has the same key and another request"):
        producer.submit_many(requests, idempotency_keys=keys)
    assert queued(connection) == before


@pytest.mark.parametrize("options", [{"idempotency_key": "k"}, {"idempotent": True}])
def test_how_tokens_come_is_no_part_of_the_request(
    connection: redis.Redis, producer: Producer, options: Any
) -> None:
    job = producer.submit(prompt="x", **options)
    assert producer.submit(prompt="x", stream=True, **options) == job
    two: list[Any] = [{"prompt": "y", "stream": stream} for stream in (True, False)]
    keys = {"idempotency_keys": ["two", "two"]} if "idempotency_key" in options else options
    assert len(set(producer.submit_many(two, **keys))) == 1
    assert len(queued(connection)) == 2


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_must_be_text_of_some_length(producer: Producer, key: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^idempotency_key: got .* characters; give 1 to 255$"
    ):
        producer.submit(prompt="x", idempotency_key=key)


def test_a_key_of_another_kind_is_refused(producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match="give text without lone surrogates"):
        producer.submit(prompt="x", idempotency_key="\ud800")
    with pytest.raises(InvalidRequest, match=r"^idempotency_key: got 5; give a text$"):
        producer.submit(prompt="x", idempotency_key=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [["--idempotency-key", "k"], ["--idempotent"]])
def test_the_command_line_submits_once(
    connection: redis.Redis, producer: Producer, redis_url: str, option: list[str]
) -> None:
    command = ["submit", "x", "--detach", "--redis-url", redis_url, *option]
    results = [CliRunner().invoke(cli, command) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout
    assert queued(connection) == [results[0].stdout.strip()]
