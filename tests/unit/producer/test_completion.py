"""A result is the response body, with attributes; a malformed one is a sentence."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from omlx_producer import Completion, MalformedResult
from omlx_producer.client.outcome import answer_of, event_of
from omlx_producer.wire import End

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
}
HEAD = {"id": "x", "created": 1, "model": "demo", "usage": USAGE}
TEXT = {
    **HEAD,
    "object": "text_completion",
    "choices": [
        {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": None},
        {"index": 1, "text": "b", "finish_reason": "length", "logprobs": None},
    ],
}
CHAT = {
    **HEAD,
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ],
}


def read(body: Any) -> Completion:
    return answer_of("j1", End(body=body))


def test_a_completion_has_its_texts_and_usage_as_attributes() -> None:
    completion = read(TEXT)
    assert completion.text == "a"
    assert [choice.text for choice in completion.choices] == ["a", "b"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
    assert completion.choices[0].message is None
    assert completion.usage.completion_tokens == 2


def test_a_chat_completion_has_its_text_and_its_message() -> None:
    completion = read(CHAT)
    assert completion.choices[0].message is not None
    assert completion.text == completion.choices[0].message.content == "hi"


@pytest.mark.parametrize("body", [TEXT, CHAT], ids=["text", "chat"])
def test_a_completion_is_the_dict_of_the_response_body(body: dict[str, Any]) -> None:
    completion = read(body)
    assert completion == body
    assert completion["usage"]["prompt_tokens"] == 3
    assert json.loads(json.dumps(completion)) == body
    for again in (copy.deepcopy(completion), pickle.loads(pickle.dumps(completion))):
        assert (again, again.text) == (completion, completion.text)


def test_the_attributes_have_the_names_of_openai() -> None:
    theirs = TextCompletion.model_validate(TEXT)
    assert theirs.choices[1].finish_reason == read(TEXT).choices[1].finish_reason
    assert theirs.choices[1].text == read(TEXT).choices[1].text
    assert theirs.usage is not None
    assert theirs.usage.total_tokens == read(TEXT).usage.total_tokens
    assert theirs.usage.prompt_tokens_details is not None
    assert theirs.usage.prompt_tokens_details.cached_tokens == 2
    assert read(TEXT).usage.prompt_tokens_details.cached_tokens == 2
    chat = ChatCompletion.model_validate(CHAT)
    message = read(CHAT).choices[0].message
    assert message is not None
    assert (chat.choices[0].message.content, chat.choices[0].message.role) == (
        message.content,
        message.role,
    )


def test_a_result_of_an_older_worker_has_no_cached_tokens() -> None:
    usage = {name: count for name, count in USAGE.items() if name != "prompt_tokens_details"}
    assert read({**TEXT, "usage": usage}).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (5, "not a JSON object"),
        (None, "not a JSON object"),
        ({}, "choices: Field required"),
        ({**TEXT, "choices": []}, "choices: List should have at least 1 item"),
        ({**TEXT, "choices": [{"index": 0, "finish_reason": "stop"}]}, "choices.0.text: "),
        ({"object": "list", "data": [], "usage": USAGE}, "data: List should have at least 1 item"),
        ({**TEXT, "usage": {"prompt_tokens": 3}}, "usage.completion_tokens: Field required"),
    ],
)
def test_a_malformed_result_is_refused_with_a_sentence(body: Any, reason: str) -> None:
    with pytest.raises(MalformedResult, match=f"^the result of job j1 .*{reason}") as caught:
        read(body)
    assert caught.value.job_id == "j1"
    with pytest.raises(MalformedResult):
        event_of("j1", End(body=body), 0)
