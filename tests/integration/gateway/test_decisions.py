"""Decisions over HTTP: the probabilities of choices, in chats, completions and batches."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from tests.helpers.workers import ALIAS

pytestmark = pytest.mark.usefixtures("worker")

DECISION: dict[str, Any] = {
    "structured_outputs": {"choice": ["a", "b"]},
    "probabilities": True,
}
# A letter's log-probability by the fake engine is minus its number.
SHARES = pytest.approx({"a": math.e / (1 + math.e), "b": 1 / (1 + math.e)})
CHAT: Any = {"model": ALIAS, "messages": [{"role": "user", "content": "x"}]}


def test_a_choice_of_an_answer_has_them(client: OpenAI) -> None:
    chat = client.chat.completions.create(**CHAT, extra_body=DECISION)
    assert chat.choices[0].message.content == "a"
    assert chat.choices[0].model_dump()["probabilities"] == SHARES
    text = client.completions.create(model=ALIAS, prompt=["x", "yz"], extra_body=DECISION)
    assert [choice.text for choice in text.choices] == ["a", "a"]
    assert [choice.model_dump()["probabilities"] for choice in text.choices] == [SHARES, SHARES]
    assert text.usage
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 0)


def test_rows_of_a_batch_have_them(client: OpenAI, gateway: str) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    body = {"model": ALIAS, "prompt": "x", **DECISION}
    content = json.dumps({**line, "body": body}).encode()
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id, batch.errors
    told = json.loads(httpx2.get(f"{gateway}/v1/files/{batch.output_file_id}/content").text)
    assert told["response"]["body"]["choices"][0]["probabilities"] == SHARES


def test_what_cannot_hold_them_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="stream: given beside probabilities"):
        client.chat.completions.create(**CHAT, stream=True, extra_body=DECISION)
    with pytest.raises(BadRequestError, match="probabilities: a response has none; ask for a chat"):
        client.responses.create(model=ALIAS, input="x", extra_body=DECISION)
    with pytest.raises(BadRequestError, match="probabilities: given without choices"):
        client.chat.completions.create(**CHAT, extra_body={"probabilities": True})
