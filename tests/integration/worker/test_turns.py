"""Conversations of several turns that are answered one after the other."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from redis import Redis
from rq.defaults import RQ_KEY_PREFIX as RQ

from omlx_producer import Completion, InvalidRequest, JobCancelled, JobFailed, Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import Row, digest_of
from omlx_producer.wire import GenerationRequest, events_key
from omlx_worker.control.intake import decode_request
from tests.helpers.leases import claim, kill, table
from tests.helpers.redis_server import values_up_to_1_mib
from tests.helpers.workers import (
    ALIAS,
    run_burst,
    running_worker,
    started,
    streamed_text,
    wait_for,
)

ANSWER = {"role": "assistant", "generate": True}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


THREE = [user("one"), ANSWER, user("two"), ANSWER, user("three"), ANSWER]
THREE_AGAIN = GenerationRequest.parse({"model": ALIAS, "messages": THREE}).to_payload()
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
TURN = {"message": 0, "finish_reason": "stop", "usage": USAGE}
OPTIONS: dict[str, Any] = {"model": ALIAS, "seed": 7, "max_completion_tokens": 12}


@pytest.fixture
def producer(connection: Redis) -> Producer:
    return Producer(connection)


def submit(producer: Producer, messages: list[dict[str, Any]], **options: Any) -> str:
    fields = {**OPTIONS, "priority": "bulk", **options}
    return producer.submit(messages=messages, require_known_model=False, **fields).id


def turn_by_turn(
    url: str, producer: Producer, **options: Any
) -> tuple[list[dict[str, Any]], list[Completion]]:
    """The same conversation as somebody has it who waits for each answer."""
    messages: list[dict[str, Any]] = []
    answers = []
    for text in ("one", "two", "three"):
        messages.append(user(text))
        job = submit(producer, messages, **options)
        run_burst(url)
        answers.append(producer.result(job))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return messages, answers


@pytest.mark.parametrize("priority", ["bulk", "default"])
@pytest.mark.parametrize("last", [THREE, THREE[:-1]])
def test_each_turn_reads_the_answers_before_it(
    redis_url: str, producer: Producer, last: list[dict[str, Any]], priority: str
) -> None:
    messages, answers = turn_by_turn(redis_url, producer)
    job = submit(producer, last, priority=priority)
    run_burst(redis_url)
    result = producer.result(job)
    assert result["messages"] == messages
    assert result.text == answers[-1].text
    assert [turn["message"] for turn in result["turns"]] == [1, 3, 5]
    ends = [answer.choices[0].finish_reason for answer in answers]
    assert [turn["finish_reason"] for turn in result["turns"]] == ends
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert result["usage"][name] == sum(answer["usage"][name] for answer in answers)
    assert [turn["usage"] for turn in result["turns"]] == [answer["usage"] for answer in answers]


def test_a_single_placeholder_gives_the_conversation_too(
    redis_url: str, producer: Producer
) -> None:
    job = submit(producer, [user("one"), ANSWER])
    run_burst(redis_url)
    result = producer.result(job)
    assert result["messages"] == [user("one"), {"role": "assistant", "content": result.text}]
    job = submit(producer, [user("one")])
    run_burst(redis_url)
    assert "messages" not in producer.result(job)


def test_only_the_last_answer_is_streamed(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    job = submit(producer, THREE, priority="default")
    with running_worker(redis_url, step_seconds=0.005):
        *tokens, end = producer.stream(job)
        result = producer.result(job)
    streamed = "".join(event.choices[0].text for event in tokens)
    assert end.usage.model_dump() == result["turns"][-1]["usage"]
    assert streamed == streamed_text(connection, job) == result.text
    # Then the end comes from the result.
    connection.xdel(events_key(job), end.stream_id)
    *again, from_result = producer.stream(job)
    assert again == tokens
    assert from_result.usage == end.usage


def request_of(connection: Redis, job: str) -> GenerationRequest:
    """The request that waits in a job's hash."""
    return decode_request(connection.hget(f"{RQ}:job:{job}", "data") or b"", ALIAS)


def test_a_worker_that_dies_takes_no_answered_turn_with_it(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    messages, answers = turn_by_turn(redis_url, producer, max_completion_tokens=40)
    job = submit(producer, THREE, max_completion_tokens=40)
    with running_worker(redis_url, step_seconds=0.02):
        wait_for(lambda: len(request_of(connection, job).turns) == 1 and started(connection))
    leases = table(connection, "victim")
    assert [claimed.id for claimed in claim(leases)] == [job]
    kill(connection, leases)
    assert len(request_of(connection, job).turns) == 1
    with running_worker(redis_url) as worker:
        result = producer.result(job, timeout=20)
        tokens = worker.decode_thread.counters.tokens
    assert result["messages"] == messages
    assert tokens == sum(answer.usage.completion_tokens for answer in answers[1:])


def test_a_worker_that_lost_its_lease_writes_no_answer(
    connection: Redis, producer: Producer
) -> None:
    job = submit(producer, THREE)
    stale, leases = table(connection, "stale"), table(connection)
    [old] = claim(stale)
    kill(connection, stale)
    [new] = claim(leases)
    assert stale.give_back([old], {old: b"other"}) == 0
    assert request_of(connection, job).turns == []
    assert leases.give_back([new]) == 1


def test_the_worker_that_has_read_a_conversation_takes_its_next_turn(
    connection: Redis, producer: Producer
) -> None:
    job = submit(producer, THREE)
    reader, other = table(connection, "reader"), table(connection, "other")
    behind = submit(producer, THREE[:1])
    [read] = claim(reader)
    assert reader.give_back([read], {read: THREE_AGAIN}) == 1
    assert [each.id for each in claim(other, 9)] == [behind]
    [again] = claim(reader, 9)
    assert again.id == job
    assert reader.give_back([again], {again: THREE_AGAIN}) == 1
    until = float((connection.hget(f"{RQ}:job:{job}", "omlx_kept") or b"").split()[0])
    assert until == pytest.approx(float(connection.time()[0]), abs=3)
    connection.hset(f"{RQ}:job:{job}", "omlx_kept", f"{until - 5} reader")
    assert [each.id for each in claim(other, 9)] == [job], "if the worker does not come"


def test_a_conversation_that_is_submitted_again_is_the_same_job(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    once: dict[str, Any] = {"max_completion_tokens": 60, "idempotency_key": "once"}
    job = submit(producer, THREE, **once)
    with running_worker(redis_url, step_seconds=0.005):
        wait_for(lambda: len(request_of(connection, job).turns) == 1)
        assert submit(producer, THREE, **once) == job
        for other in (THREE[:-1], [user("else"), *THREE[1:]]):
            with pytest.raises(InvalidRequest, match="has the same key and another request"):
                submit(producer, other, **once)
        assert len(producer.result(job)["turns"]) == 3
    assert submit(producer, THREE, **once) == job


def test_a_cancelled_conversation_has_no_further_turn(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    job = submit(producer, THREE, max_completion_tokens=400)
    with running_worker(redis_url, step_seconds=0.002):
        wait_for(lambda: len(request_of(connection, job).turns) == 1)
        producer.cancel(job)
        with pytest.raises(JobCancelled):
            producer.result(job, timeout=20)
        assert len(request_of(connection, job).turns) < 3


def test_a_turn_that_does_not_fit_fails_the_conversation_with_its_reason(
    redis_url: str, producer: Producer
) -> None:
    job = submit(producer, [user("one"), ANSWER, user("x" * 9_000)], max_completion_tokens=995)
    run_burst(redis_url)
    with pytest.raises(JobFailed, match="tokens; at most"):
        producer.result(job)


def test_a_turn_that_makes_a_conversation_too_long_for_redis_fails_it_alone(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    noise = random.Random(0).randbytes(1_100_000).hex()
    long = submit(producer, THREE, chat_template_kwargs={"noise": noise})
    other = submit(producer, THREE)
    with values_up_to_1_mib(connection):
        run_burst(redis_url)
    with pytest.raises(JobFailed, match="request: Redis does not take what its job writes"):
        producer.result(long)
    assert len(producer.result(other)["turns"]) == 3


def test_rows_of_a_batch_hold_all_answers(
    redis_url: str, connection: Redis, producer: Producer
) -> None:
    messages, answers = turn_by_turn(redis_url, producer)
    request = GenerationRequest.parse({**OPTIONS, "messages": THREE})
    batch = Batch.create(connection)
    batch.upload([Row(f"r{n}", n, request, digest_of(f"r{n}", request.to_wire())) for n in (1, 2)])
    run_burst(redis_url)
    state = batch.read()
    assert (state.state, state.ok) == ("done", 2)
    for line in map(json.loads, batch.results(2)):
        assert line["response"]["body"]["messages"] == messages
    tokens = 2 * sum(answer.usage.completion_tokens for answer in answers)
    assert state.usage.completion_tokens == tokens


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"messages": [{**user("x"), "generate": True}]},
            r"generate: given in a message of the user",
        ),
        ({"messages": [user("x"), {**ANSWER, "content": "y"}]}, "generate: given beside content"),
        ({"messages": [ANSWER, user("x")]}, r"messages\[0\].generate: given first or beside"),
        (
            {"messages": [user("x"), ANSWER, ANSWER]},
            r"messages\[1\].generate: given first or beside",
        ),
        ({"messages": THREE, "n": 2}, "n: got 2 beside generate in messages"),
        ({"messages": [user("x")], "n": 2, "turns": [TURN]}, "turns: workers write it"),
        ({"prompt": "x", "turns": [TURN]}, "turns: workers write it"),
    ],
)
def test_placeholders_that_make_no_conversation_are_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        GenerationRequest.parse({"model": ALIAS, **fields})
