"""A chat's text becomes a message with content, thinking and calls."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest

from omlx_producer.wire import FunctionCall
from omlx_producer.wire.markup import read
from omlx_worker.delivery.response import message_of
from omlx_worker.engine.rows.reply import ReplyForm
from tests.helpers.markups import between


def read_call(text: str) -> list[FunctionCall]:
    """Names of functions, apart by commas; anything with a ? is no call."""
    if "?" in text:
        return []
    return [FunctionCall(name=name, arguments='{"x": 5}') for name in text.split(",")]


THINKS = between(("<think>", "</think>"))
CALLS = between(("<think>", "</think>"), ("<call>", "</call>"))
FORM = ReplyForm(CALLS, read_call)


def test_a_text_without_a_form_is_its_content() -> None:
    assert message_of("<think>a", None, "j:0") == {"role": "assistant", "content": "<think>a"}


def test_a_text_without_calls_is_taken_apart_once() -> None:
    with patch("omlx_worker.delivery.response.read", wraps=read) as reading:
        message_of("<think>hm</think>Yes.", FORM, "j:0")
        assert reading.call_count == 1
        message_of("<think>hm</think>Yes.<call>?", FORM, "j:0")
        assert reading.call_count == 3


def test_thinking_is_apart_from_the_content() -> None:
    assert message_of("<think>hm</think>\n\nYes.", ReplyForm(THINKS), "j:0") == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
    }


def test_calls_have_ids_names_and_arguments_as_text_and_null_for_content() -> None:
    message = message_of("<call>f</call>\n<call>g,h</call>\n", FORM, "j:0")
    assert message["content"] is None
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g", "h"]
    assert {call["type"] for call in calls} == {"function"}
    assert json.loads(calls[0]["function"]["arguments"]) == {"x": 5}


def test_content_stays_beside_calls() -> None:
    assert message_of("I call.\n<call>f</call>", FORM, "j:0")["content"] == "I call."


def test_the_ids_of_calls_are_their_own_and_the_same_at_every_try() -> None:
    def ids(row_id: str) -> list[str]:
        message = message_of("<call>f</call><call>f</call>", FORM, row_id)
        return [call["id"] for call in message["tool_calls"]]

    assert ids("j:0") == ids("j:0")
    assert len({*ids("j:0"), *ids("j:1"), *ids("k:0")}) == 6
    assert all(name.startswith("call_") for name in ids("j:0"))


def test_what_cannot_be_read_stays_in_the_content() -> None:
    text = "I call.\n<call>f?</call>"
    assert message_of(text, FORM, "j:0") == {"role": "assistant", "content": text}
    assert message_of("<call>f", ReplyForm(CALLS), "j:0")["content"] == "<call>f"


def test_a_call_that_was_cut_is_not_read_though_it_looks_whole() -> None:
    def names(text: str, form: ReplyForm = FORM) -> list[str]:
        message = message_of(text, form, "j:0", cut=True)
        return [call["function"]["name"] for call in message.get("tool_calls", ())]

    assert names("<call>f</call><call>g") == ["f"]
    assert names("<call>f</call><call>g</cal") == ["f"]
    assert names("<call>f</call><call>g</call>") == ["f", "g"]
    assert names("<call>f</call> and") == ["f"]
    assert names("<call>f") == []
    endless = between(call=("<call>", ""))
    assert names("<call>f", ReplyForm(endless, read_call)) == ["f"]
    assert message_of("a\n<call>f", FORM, "j:0", cut=True)["content"] == "a\n<call>f"


def test_the_whole_calls_of_a_section_that_was_cut_count() -> None:
    form = ReplyForm(CALLS, read_call, lambda text: read_call(text.rpartition(",")[0]))
    message = message_of("I call.<call>f,g,h", form, "j:0", cut=True)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert message["content"] == "I call."


def test_calls_that_can_be_read_count_beside_one_that_was_cut() -> None:
    message = message_of("<call>f</call><call>?", FORM, "j:0")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] is None


@pytest.mark.parametrize("text", ["<call>f</call><call>g</call>", "<call>?</call><call>f,g</call>"])
def test_a_form_for_one_call_takes_the_first_that_can_be_read(text: str) -> None:
    message = message_of(text, ReplyForm(CALLS, read_call, parallel=False), "j:0")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] is None
