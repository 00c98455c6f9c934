"""Rerankings: a decision for each document, in the form of Jina and Cohere."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import pytest
from redis import Redis

from omlx_gateway import rerank
from tests.helpers.workers import ALIAS, fetch

pytestmark = pytest.mark.usefixtures("worker")

DOCUMENTS = ["cats!", {"text": "dogs!!!!"}, "none", "birds!!"]


def post(gateway: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{gateway}/v1/rerank", json={"query": "pets", **fields}, timeout=60)


def score(marks: int) -> float:
    """The fake engine's score of a document with this many exclamation marks."""
    yes, no = (sum(map(ord, text)) / (1 + marks) for text in ("yes", "no"))
    return 1 / (1 + math.exp(yes - no))


def test_documents_come_with_their_scores_the_best_first(gateway: str) -> None:
    answer = post(gateway, model=ALIAS, documents=DOCUMENTS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == ALIAS
    assert [each["index"] for each in body["results"]] == [1, 3, 0, 2]
    told = [each["relevance_score"] for each in body["results"]]
    assert told == pytest.approx([score(marks) for marks in (4, 2, 1, 0)])
    assert set(body["results"][0]) == {"index", "relevance_score"}
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 4 * len("pets")
    assert len(answer.headers["X-Omlx-Job"].split(",")) == 4


def test_the_best_few_are_told_with_their_texts_on_request(gateway: str) -> None:
    body = post(gateway, documents=DOCUMENTS, top_n=2, return_documents=True, model=None).json()
    documents = [each["document"]["text"] for each in body["results"]]
    assert documents == ["dogs!!!!", "birds!!"]


def test_every_document_is_a_chat_in_the_words_of_qwens_reranker(
    gateway: str, connection: Redis
) -> None:
    plain = post(gateway, documents=["cats"]).headers["X-Omlx-Job"]
    own = post(gateway, documents=["cats"], instruction="Find pets").headers["X-Omlx-Job"]
    for job, instruction in ((plain, rerank.INSTRUCTION), (own, "Find pets")):
        request = fetch(connection, job).kwargs["request"]
        assert request["messages"] == [
            {"role": "system", "content": rerank.JUDGE},
            {
                "role": "user",
                "content": f"<Instruct>: {instruction}\n<Query>: pets\n<Document>: cats",
            },
        ]
        assert request["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"documents": []}, "documents: got []; give a list of 1 to 1000 texts, or of objects"),
        ({"documents": ["x"] * 1001}, "documents: got "),
        ({"documents": [""]}, "documents[0]: got ''; give a list of 1 to 1000 texts, or of"),
        ({"documents": [{"url": "x"}]}, "documents[0]: got None; give a list of 1 to 1000 texts"),
        ({"documents": ["x"], "top_n": 0}, "top_n: got 0; give a whole number of at least 1"),
        ({"documents": ["x"], "query": None}, "query: missing; give query"),
        ({"documents": ["x"], "stream": True}, "stream: unknown field"),
        (
            {"documents": ["x"] * 900, "query": "y" * 9000},
            "documents: got 8199000 characters, with the query before each; give at most 8000000",
        ),
    ],
)
def test_what_is_none_gets_one_sentence(
    gateway: str, fields: dict[str, Any], sentence: str
) -> None:
    answer = post(gateway, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(sentence)


@pytest.mark.parametrize(
    # Seen by the gateway, and by the worker alone.
    "length",
    [20_000, 9_742],
)
def test_a_document_that_does_not_fit_is_named(gateway: str, length: int) -> None:
    error = post(gateway, documents=["cats", "x" * length]).json()["error"]
    assert error["param"] == "documents[1]"
    assert error["message"].startswith("documents[1]: got ")


def test_what_is_wrong_with_all_documents_names_none(gateway: str) -> None:
    error = post(gateway, model="other", documents=["cats", "dogs"]).json()["error"]
    assert error["message"].startswith("model: got 'other', which no worker has announced")
