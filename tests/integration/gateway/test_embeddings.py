"""OpenAI's own client gets vectors, at once and as rows of batches."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from redis import Redis

from omlx_producer.wire.embedding import read_vector
from tests.helpers.fake_engine import vector_of
from tests.helpers.workers import ALIAS, running_worker, wait_for

SIZE = 4
TEXTS = ["x", "xx", "xxx"]
VECTORS = [array("f", vector_of(len(text), SIZE)).tolist() for text in TEXTS]


@pytest.fixture
def embedder(redis_url: str, connection: Redis) -> Iterator[None]:
    """A worker that makes vectors."""
    with running_worker(redis_url, vector_size=SIZE):
        wait_for(lambda: connection.exists("omlx:models"))
        yield


@pytest.mark.usefixtures("embedder")
@pytest.mark.parametrize("given", [TEXTS, [[7], [7, 8], [7, 8, 9]]])
def test_texts_and_tokens_have_their_vectors_in_order(client: OpenAI, given: Any) -> None:
    # The client asks for base64 unless it is told otherwise.
    for asked in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=ALIAS, input=given, **asked)
        assert [each.embedding for each in answer.data] == VECTORS
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    short = client.embeddings.create(model=ALIAS, input=given, dimensions=2)
    assert [each.embedding for each in short.data] == [vector[:2] for vector in VECTORS]


@pytest.mark.usefixtures("embedder")
def test_vectors_are_lists_of_numbers_unless_base64_is_asked_for(gateway: str) -> None:
    def embedding(**fields: Any) -> Any:
        answer = httpx2.post(f"{gateway}/v1/embeddings", json={"input": "x", **fields})
        assert answer.status_code == 200
        assert answer.headers["X-Omlx-Job"]
        return answer.json()["data"][0]["embedding"]

    assert embedding() == embedding(encoding_format="float") == VECTORS[0]
    assert read_vector(embedding(encoding_format="base64")).tolist() == VECTORS[0]


@pytest.mark.usefixtures("embedder")
def test_what_cannot_be_embedded_is_refused_with_its_field(client: OpenAI, gateway: str) -> None:
    def refusal(path: str, **fields: Any) -> dict[str, Any]:
        answer = httpx2.post(f"{gateway}/v1/{path}", json={"model": ALIAS, **fields})
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error

    assert refusal("embeddings")["message"] == "input: missing; give input"
    assert refusal("embeddings", input="x", stream=True)["param"] == "stream"
    assert refusal("embeddings", input="x", encoding_format="int8")["param"] == "encoding_format"
    assert refusal("embeddings", input=["x", ""])["param"] == "input[1]"
    with pytest.raises(openai.BadRequestError, match="fake makes vectors and generates no text"):
        client.chat.completions.create(model=ALIAS, messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.usefixtures("worker")
def test_a_model_that_generates_makes_no_vectors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="fake generates text and makes no vectors"):
        client.embeddings.create(model=ALIAS, input="x")


@pytest.mark.usefixtures("embedder")
def test_rows_of_batches_have_vectors_as_base64(client: OpenAI) -> None:
    lines = [
        {
            "custom_id": text,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": ALIAS, "input": given, **fields},
        }
        for text, given, fields in (
            ("x", "x", {}),
            ("xx", ["xx", "xxx"], {}),
            ("floats", "x", {"encoding_format": "float"}),
            ("wrong", "x", {"temperature": 0.5}),
        )
    ]

    def run(rows: list[dict[str, Any]]) -> Any:
        file = client.files.create(
            file=("input.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch"
        )
        return client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )

    [error] = run(lines).errors.data
    assert (error.line, error.param) == (4, "temperature")
    batch = run(lines[:3])
    over = wait_for(lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b)
    written = client.files.content(over.output_file_id).text.splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in written]
    told = [[each["embedding"] for each in body["data"]] for body in bodies]
    assert [[read_vector(each).tolist() for each in row] for row in told] == [
        VECTORS[:1],
        VECTORS[1:],
        VECTORS[:1],
    ]
    assert isinstance(told[0][0], str)
    assert told[2] == VECTORS[:1]


@pytest.mark.usefixtures("embedder")
def test_beside_a_model_of_text_no_model_needs_a_name(
    gateway: str, redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url, model_alias="text"):
        wait_for(lambda: connection.hexists("omlx:models", "text"))
        asked = {
            "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "completions": {"prompt": "x"},
            "responses": {"input": "x"},
            "embeddings": {"input": "x"},
        }
        answers = {
            path: httpx2.post(f"{gateway}/v1/{path}", json=body, timeout=20).json()
            for path, body in asked.items()
        }
    models = {path: answer.get("model", answer) for path, answer in answers.items()}
    assert models == {**dict.fromkeys(asked, "text"), "embeddings": ALIAS}
