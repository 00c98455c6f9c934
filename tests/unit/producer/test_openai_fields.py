"""Every parameter of OpenAI's chat and text completions is served, ignored, or refused by name."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.wire import GenerationRequest, ImagePart, Message, TextPart
from omlx_producer.wire.chat import ImageUrl
from omlx_producer.wire.openai_fields import (
    IGNORED,
    IGNORED_IN_IMAGES,
    IGNORED_IN_MESSAGES,
    IGNORED_IN_PARTS,
    REFUSED,
    REFUSED_IN_MESSAGES,
    ignored_fields,
)
from tests.helpers.image_parts import image

OK = {"model": "demo", "prompt": "x"}
SERVED = {*GenerationRequest.model_fields, "max_tokens"}


def names(typed_dict: Any) -> set[str]:
    return set(typing.get_type_hints(typed_dict))


def wire(data: dict[str, Any]) -> dict[str, Any]:
    return GenerationRequest.parse(data).to_wire()


def assistant(**fields: Any) -> dict[str, Any]:
    """The message that the worker gets of an assistant's turn."""
    turn = {"role": "assistant"} | fields
    (message,) = wire({"model": "demo", "messages": [{"role": "user", "content": "a"}, turn]})[
        "messages"
    ][1:]
    return message


def test_every_parameter_of_openai_is_served_ignored_or_refused() -> None:
    chat = pytest.importorskip("openai.types.chat.completion_create_params")
    text = pytest.importorskip("openai.types.completion_create_params")
    parameters = set[str]()
    for module in (chat, text):
        parameters |= names(module.CompletionCreateParamsStreaming)
        parameters |= names(module.CompletionCreateParamsNonStreaming)
    assert parameters - SERVED - IGNORED - set(REFUSED) == set()
    assert SERVED & IGNORED == SERVED & set(REFUSED) == IGNORED & set(REFUSED) == set()
    assert IGNORED | set(REFUSED) <= parameters


def test_every_field_of_a_message_of_openai_is_served_ignored_or_refused() -> None:
    chat = pytest.importorskip("openai.types.chat")
    fields = set[str]()
    for message in typing.get_args(chat.ChatCompletionMessageParam):
        fields |= names(message)
    served = set(Message.model_fields)
    assert fields - served - IGNORED_IN_MESSAGES - set(REFUSED_IN_MESSAGES) == set()
    assert names(chat.ChatCompletionContentPartTextParam) == (
        set(TextPart.model_fields) | IGNORED_IN_PARTS
    )
    picture = typing.get_type_hints(chat.ChatCompletionContentPartImageParam)
    assert set(picture) == set(ImagePart.model_fields) | IGNORED_IN_PARTS
    assert names(picture["image_url"]) == set(ImageUrl.model_fields) | IGNORED_IN_IMAGES


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_a_field_without_effect_is_accepted_and_dropped(field: str) -> None:
    assert wire(OK | {field: "x"}) == OK


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_field_that_would_change_the_text_is_refused_by_name_unless_it_is_null(
    field: str,
) -> None:
    assert wire(OK | {field: None}) == OK
    with pytest.raises(InvalidRequest, match=f"^{field}: .*[a-z]") as caught:
        GenerationRequest.parse(OK | {field: "x"})
    assert "unknown" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"]},
        {"tool_choice": "none", "tools": []},
        {"function_call": "none", "functions": []},
        {"best_of": 1, "suffix": ""},
        {"verbosity": "medium"},
    ],
)
def test_a_value_that_asks_for_what_happens_anyway_is_accepted(fields: dict[str, Any]) -> None:
    assert wire(OK | fields) == OK


def test_a_field_that_is_null_counts_as_not_given() -> None:
    assert wire(OK | dict.fromkeys({*SERVED, *IGNORED, *REFUSED} - {*OK})) == OK
    assert wire(OK | {"max_tokens": None, "max_completion_tokens": 5})["max_completion_tokens"] == 5


def test_ignored_fields_are_those_that_are_given() -> None:
    given = OK | {"user": "a", "store": None, "seed": 1, "metadata": {}}
    assert ignored_fields(given) == ["user", "metadata"]


def test_the_detail_of_a_picture_is_ignored_and_told() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": [image(detail="low")]}]}
    assert ignored_fields(chat | {"user": "a"}) == ["user", "image_url.detail"]
    assert wire(chat) == wire({**chat, "messages": [{"role": "user", "content": [image()]}]})
    assert ignored_fields({"messages": [5, {"content": [image(detail=None), 5]}]}) == []


def test_a_turn_of_the_assistant_may_have_no_content() -> None:
    empty = {"role": "assistant", "content": ""}
    assert assistant(content=None) == empty
    assert assistant(content=None, refusal=None, tool_calls=None, audio=None) == empty
    assert assistant(content=None, refusal="no", name="a") == empty | {"content": "no", "name": "a"}
    assert assistant(content="yes", refusal=None) == empty | {"content": "yes"}


def test_a_refusal_among_the_parts_of_a_turn_is_its_text() -> None:
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "t"}]
    assert assistant(content=parts)["content"] == [
        {"type": "text", "text": "no"},
        {"type": "text", "text": "t"},
    ]


def test_a_text_completion_may_count_its_alternatives_and_list_one_prompt() -> None:
    assert wire(OK | {"logprobs": 3}) == OK | {"logprobs": True, "top_logprobs": 3}
    assert wire(OK | {"logprobs": 0}) == OK | {"logprobs": True, "top_logprobs": 0}
    assert wire(OK | {"prompt": ["x"]}) == OK
    assert wire(OK | {"prompt": [[1, 2]]})["prompt"] == [1, 2]


def test_token_ids_of_biases_may_be_numbers() -> None:
    assert wire(OK | {"logit_bias": {1: 5, "2": -1}})["logit_bias"] == {"1": 5, "2": -1}
    for key in (-1, True, 1.5, 10**5000):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            wire(OK | {"logit_bias": {key: 5}})
