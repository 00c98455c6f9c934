"""Texts go in and vectors come out, by Python's clients and as jobs of the queue."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

import pytest
import redis

from omlx_producer import AsyncProducer, JobFailed, Producer
from omlx_producer.errors import InvalidRequest
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.fake_engine import CONTEXT, vector_of
from tests.helpers.workers import events, running_worker

SIZE = 4
TEXTS = [f"{'x' * (number % 7 + 1)}" for number in range(150)]
VECTORS = [array("f", vector_of(len(text), SIZE)) for text in TEXTS]


@pytest.fixture
def producer(redis_url: str, connection: redis.Redis) -> Iterator[Producer]:
    """A producer beside a worker that makes vectors."""
    with running_worker(redis_url, vector_size=SIZE), Producer(redis_url) as producer:
        wait_for_model(connection)
        yield producer


def test_texts_have_their_vectors_in_order_however_many_jobs_they_take(producer: Producer) -> None:
    assert producer.embed(TEXTS) == VECTORS
    assert producer.embed([]) == []
    assert producer.embed(["x"], dimensions=2) == [VECTORS[0][:2]]


def test_asyncio_gets_the_same(producer: Producer, redis_url: str) -> None:
    async def embed() -> list[array[float]]:
        async with AsyncProducer(redis_url) as asking:
            return await asking.embed(TEXTS)

    assert asyncio.run(embed()) == VECTORS


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("xx", [VECTORS[1]]),
        ([7, 8], [VECTORS[1]]),
        (["x", "xx"], VECTORS[:2]),
        ([[7], [7, 8]], VECTORS[:2]),
    ],
)
def test_a_job_takes_all_of_openais_forms(
    producer: Producer,
    connection: redis.Redis,
    given: str | list[int] | list[str] | list[list[int]],
    vectors: list[array[float]],
) -> None:
    job = producer.submit(input=given)
    result = job.result(timeout=20)

    tokens = sum(int(vector[0]) for vector in vectors)
    assert result.vectors == vectors
    assert result["object"] == "list"
    assert [each["index"] for each in result["data"]] == list(range(len(vectors)))
    assert (result.usage.prompt_tokens, result.usage.total_tokens) == (tokens, tokens)
    assert [event.type for event in events(connection, job.id)] == ["done"]


def test_floats_are_written_if_they_are_asked_for(producer: Producer) -> None:
    result = producer.submit(input="x", encoding_format="float").result(timeout=20)

    assert result["data"][0]["embedding"] == [1.0, 2.0, 3.0, 4.0]
    assert result.vectors == VECTORS[:1]


def test_a_job_of_the_other_kind_is_refused_before_it_is_queued(producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match="prompt: fake makes vectors and generates no text;"):
        producer.submit(prompt="x")
    with pytest.raises(InvalidRequest, match="input: got 10001 tokens; give at most the 10000"):
        producer.submit(input=[[1], [1] * (CONTEXT + 1)])
    with pytest.raises(InvalidRequest, match="texts: got a text; give a list of texts"):
        producer.embed("x")


@pytest.mark.parametrize(
    ("size", "fields", "sentence"),
    [
        (0, {"input": "x"}, "input: fake generates text and makes no vectors; name a model"),
        (SIZE, {"prompt": "x"}, "prompt: fake makes vectors and generates no text; name another"),
    ],
)
def test_a_job_of_the_other_kind_that_was_queued_before_fails_with_the_same_sentence(
    redis_url: str, size: int, fields: dict[str, str], sentence: str
) -> None:
    with Producer(redis_url) as producer:
        job = producer.submit({"model": "fake", **fields}, require_known_model=False)
        with running_worker(redis_url, vector_size=size), pytest.raises(JobFailed, match=sentence):
            job.result(timeout=20)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": "x", "temperature": 0}, "temperature: given beside input, of which"),
        ({"input": "x", "prompt": "x"}, "prompt: given beside input, of which vectors are made"),
        ({"prompt": "x", "dimensions": 4}, "dimensions: given without input; leave it out"),
        ({"input": ""}, "input: got ''; give a text or its token ids, or a list of up to 2048"),
        ({"input": []}, "input: got []; give a text or its token ids, or a list of up to 2048"),
        ({"input": ["x", ""]}, "input[1]: empty; give text, or leave it out"),
        ({"input": ["x", [1]]}, "input: got values of several kinds; give texts or lists of ids"),
        ({"input": ["x"] * 2049}, "input: got 2049 texts; give at most 2048"),
    ],
)
def test_fields_that_do_not_go_together_are_named(
    redis_url: str, fields: dict[str, object], sentence: str
) -> None:
    with Producer(redis_url) as producer, pytest.raises(InvalidRequest) as refused:
        producer.submit({"model": "fake", **fields}, require_known_model=False)
    assert str(refused.value).startswith(sentence)
