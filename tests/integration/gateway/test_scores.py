"""Scored prompts over HTTP: OpenAI's `echo` with `logprobs`, vLLM's field."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import OpenAI
from redis import Redis

from omlx_producer import Producer
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.workers import ALIAS, events, fetch

pytestmark = pytest.mark.usefixtures("worker")

AB = {"a": -0.5, "b": -1.5}
"""The two likeliest tokens of every place in a prompt of the fake engine."""

OF_Z = {
    "122": {"logprob": -122.0, "rank": 7, "decoded_token": "z"},
    "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
}


def ask(gateway: str, path: str, **fields: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{gateway}/v1/{path}", json={"model": ALIAS, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_an_echo_has_the_log_probabilities_of_the_prompt_and_then_of_the_text(
    client: OpenAI,
) -> None:
    asked: Any = {"model": ALIAS, "prompt": "yz", "seed": 3, "max_tokens": 4}
    plain = client.completions.create(**asked).choices[0]
    answer = client.completions.create(**asked, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == "yz" + plain.text
    assert choice.logprobs
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:2] == ["y", "z"]
    assert choice.logprobs.model_dump()["token_logprobs"][:2] == [None, -122.0]
    assert choice.logprobs.model_dump()["top_logprobs"][:2] == [None, AB]
    assert choice.logprobs.model_dump()["text_offset"][:2] == [0, 1]


def test_prompts_alone_are_scored_without_a_token(gateway: str, connection: Redis) -> None:
    fields = {"prompt": ["xyz", "wz"], "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = httpx2.post(f"{gateway}/v1/completions", json={"model": ALIAS, **fields})
    body = answer.json()
    assert [choice["text"] for choice in body["choices"]] == ["xyz", "wz"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    told = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert told == [[None, -121.0, -122.0], [None, -122.0]]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    for job_id in answer.headers["x-omlx-job"].split(","):
        [done] = events(connection, job_id)
        assert (done.type, done.n) == ("done", 0)
        assert fetch(connection, job_id).get_status() == "finished"


def test_answers_to_several_prompts_that_are_too_long_together_are_refused(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_gateway.completions.MAX_ANSWER_BYTES", 2**20)
    prompts = ["y" * 5_000] * 3
    fields = {"model": ALIAS, "prompt": prompts, "prompt_logprobs": 1, "max_tokens": 0}
    answer = httpx2.post(f"{gateway}/v1/completions", json=fields, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "prompt: the answers to 3 prompts take more than 1 MiB; "
        "give fewer prompts, or upload a batch"
    )
    assert ask(gateway, "completions", **fields | {"prompt": prompts[:1]})["choices"]


def test_vllms_field_is_answered_in_vllms_form(gateway: str) -> None:
    [choice] = ask(gateway, "completions", prompt="yz", prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"] == [None, OF_Z]
    assert choice["logprobs"] is None
    [alone] = ask(gateway, "completions", prompt="yz", prompt_logprobs=0, max_tokens=0)["choices"]
    assert alone["prompt_logprobs"] == [None, {"122": OF_Z["122"]}]
    assert alone["text"] == ""


def test_so_is_a_chats_beside_its_choices(gateway: str) -> None:
    chat = [{"role": "user", "content": "yz"}]
    body = ask(gateway, "chat/completions", messages=chat, prompt_logprobs=1, max_tokens=0)
    assert body["prompt_logprobs"] == [None, OF_Z]
    assert body["choices"][0]["message"]["content"] == ""


def test_no_more_is_told_than_was_asked_for(gateway: str) -> None:
    [choice] = ask(gateway, "completions", prompt="yz", logprobs=1)["choices"]
    assert "prompt_logprobs" not in choice
    assert choice["text"][:2] != "yz"
    [choice] = ask(gateway, "completions", prompt="yz", echo=True, max_tokens=2)["choices"]
    assert choice["text"].startswith("yz")
    assert choice["logprobs"] is None


def test_a_stream_of_a_scored_job_is_that_of_any_other(redis_url: str, connection: Redis) -> None:
    wait_for_model(connection)
    with Producer(redis_url) as producer:
        job = producer.submit(
            model=ALIAS, prompt="yz", prompt_logprobs=0, seed=1, max_completion_tokens=5
        )
        text = "".join(event.choices[0].text for event in job.stream() if event.type == "tokens")
        result = job.result(20)
    assert text == result.text
    assert result.choices[0].prompt_logprobs == [None, {"122": OF_Z["122"]}]
    assert result.usage.speculation.steps <= result.usage.completion_tokens + 1
