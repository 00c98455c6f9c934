"""OpenAI's request fields over HTTP, and answers that OpenAI's own types read without loss."""

from __future__ import annotations

import json
import typing
from typing import Any

import httpx2
import pytest
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from redis import Redis

from omlx_producer import GenerationRequest
from tests.helpers.openai_parameters import BESIDE, CHATS
from tests.helpers.workers import ALIAS, fetch

CHAT = {"model": ALIAS, "messages": [{"role": "user", "content": "a"}], "max_tokens": 6}

# Every parameter of OpenAI's text completions, as `CHATS`.
TEXTS: dict[str, tuple[str, Any]] = {
    "best_of": ("refused", 3),
    "echo": ("served", True),
    "frequency_penalty": ("served", 1.5),
    "logit_bias": ("served", {"5": 10}),
    "logprobs": ("served", 2),
    "max_tokens": ("served", 5),
    "model": ("served", ALIAS),
    "n": ("served", 2),
    "presence_penalty": ("served", 1.5),
    "prompt": ("served", "other"),
    "seed": ("served", 7),
    "stop": ("served", ["x"]),
    "stream": ("served", True),
    "stream_options": ("ignored", {"include_usage": True}),
    "suffix": ("refused", "x"),
    "temperature": ("served", 0.5),
    "top_p": ("served", 0.5),
    "user": ("ignored", "x"),
}


pytestmark = pytest.mark.usefixtures("worker")


def require_whole(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Fail if OpenAI's type refuses a body or loses a part of it."""
    parsed = kind.model_validate(body)
    assert parsed.model_dump(mode="json", exclude_unset=True) == body


def chunks(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_every_field_is_served_ignored_or_refused_by_its_name(
    gateway: str, connection: Redis
) -> None:
    for field in CHATS:
        ask(gateway, connection, field)


def ask(gateway: str, connection: Redis, field: str) -> None:
    """Send a request with one field, and check what becomes of it."""
    fate, value = CHATS[field]
    value = ALIAS if field == "model" else value
    body = {**CHAT, **BESIDE.get(field, {}), field: value}
    if field == "max_completion_tokens":
        del body["max_tokens"]
    if field == "response_format":
        # The engine of the test knows no grammars.
        body[field] = {"type": "text"}
    jobs = len(connection.keys("rq:job:*"))
    answer = httpx2.post(f"{gateway}/v1/chat/completions", json=body)
    if fate == "refused":
        assert answer.status_code == 400, field
        error = answer.json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field}: ")
        assert len(connection.keys("rq:job:*")) == jobs
        return
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        for chunk in chunks(answer):
            require_whole(ChatCompletionChunk, chunk)
    else:
        require_whole(ChatCompletion, answer.json())
    request = fetch(connection, answer.headers["x-omlx-job"]).kwargs["request"]
    if fate == "ignored":
        assert field not in request
    elif field not in ("stream", "max_tokens", "response_format"):
        assert request[field] == value


def test_the_walk_knows_every_parameter_of_a_text_completion() -> None:
    params = completion_create_params
    both = params.CompletionCreateParamsStreaming, params.CompletionCreateParamsNonStreaming
    assert set(TEXTS) == {name for kind in both for name in typing.get_type_hints(kind)}


def test_every_field_of_a_text_completion_is_served_ignored_or_refused_by_its_name(
    gateway: str, connection: Redis
) -> None:
    plain = {"model": ALIAS, "prompt": "a", "stream": False}
    without = GenerationRequest.parse(plain).to_wire()
    for field, (fate, value) in TEXTS.items():
        body = {**plain, field: value}
        answer = httpx2.post(f"{gateway}/v1/completions", json=body)
        if fate == "refused":
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field}: ")
            continue
        assert answer.status_code == 200, answer.text
        request = fetch(connection, answer.headers["x-omlx-job"]).kwargs["request"]
        assert request == GenerationRequest.parse(body).to_wire()
        assert (request == without) == (fate == "ignored" or field == "model")
        if field == "stream":
            assert chunks(answer)
        else:
            require_whole(Completion, answer.json())


@pytest.mark.parametrize("streams", [True, False])
def test_a_text_with_all_that_it_can_tell_is_read_without_loss(gateway: str, streams: bool) -> None:
    body = {"model": ALIAS, "prompt": "a", "max_tokens": 6, "n": 2, "logprobs": 2}
    body |= {"stream": streams, "stream_options": {"include_usage": True}}
    answer = httpx2.post(f"{gateway}/v1/completions", json=body)
    for found in chunks(answer) if streams else [answer.json()]:
        for choice in found["choices"]:
            # OpenAI's chunks have null there, too, which its own type forbids.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        require_whole(Completion, found)


def test_a_chat_with_thinking_and_calls_is_read_without_loss(gateway: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for seed in range(4):
        body = {**CHAT, "max_tokens": 100, "seed": seed, "tools": [tool], "logprobs": True}
        answer = httpx2.post(f"{gateway}/v1/chat/completions", json=body)
        require_whole(ChatCompletion, answer.json())
        streamed = httpx2.post(f"{gateway}/v1/chat/completions", json={**body, "stream": True})
        for chunk in chunks(streamed):
            require_whole(ChatCompletionChunk, chunk)
