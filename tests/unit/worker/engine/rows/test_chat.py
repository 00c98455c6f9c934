"""Chats go through the model's template, and say how their answers are read and held."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

from omlx_producer.wire import Constraint, GenerationRequest, InvalidRequest
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.reply import ReplyForm
from tests.helpers.chats import tokenizer_of

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
DATED = {"properties": {"a": {"type": "string", "format": "date"}}}
OPENED = {"chat_template_kwargs": {"thinks": True}}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def ask(**fields: Any) -> GenerationRequest:
    return GenerationRequest.parse({"model": "m", "messages": HELLO} | fields)


def prompt(family: str = "json_tools", *, thinking: bool = False, **fields: Any) -> str:
    tokenizer = tokenizer_of(family, thinking=thinking)
    return Chat(tokenizer, "m").text(ask(**fields))


def form(family: str, *, thinking: bool = False, **fields: Any) -> ReplyForm | None:
    chat, request = Chat(tokenizer_of(family, thinking=thinking), "m"), ask(**fields)
    return chat.reply(request, chat.text(request))


def constraint(family: str, *, thinking: bool = False, **fields: Any) -> Constraint | None:
    chat, request = Chat(tokenizer_of(family, thinking=thinking), "m"), ask(**fields)
    return chat.constraint(request, chat.reply(request, chat.text(request)))


def test_calls_and_their_answers_reach_the_template_with_arguments_as_objects() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x": 5, "y": "b"}'},
    }
    conversation = [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    assert prompt(messages=conversation) == (
        "user: hello\nassistant: (hm)[call_1 f x=5;y=b;]\ntool: 7<call_1>\nassistant: "
    )


def test_tools_reach_the_template_complete_and_without_what_is_for_the_server() -> None:
    text = prompt(tools=[tool(description="d", strict=True)])
    first = text.partition("\n")[0].removeprefix("tools: ")
    assert json.loads(first) == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {
                    "type": "object",
                    "properties": {},
                    "additionalProperties": False,
                },
            },
        }
    ]


def test_tools_that_may_not_be_called_stay_out_of_the_prompt() -> None:
    assert prompt(tools=[tool()], tool_choice="none") == prompt()


def test_the_effort_reaches_the_template_and_none_means_no_thinking() -> None:
    assert prompt(reasoning_effort="low").startswith("effort: low\n")
    thoughtless = prompt(thinking=True, reasoning_effort="none", **OPENED)
    assert thoughtless.endswith("<think>\n</think>\n")
    kwargs = {"chat_template_kwargs": {"thinks": True, "enable_thinking": True}}
    assert prompt(thinking=True, reasoning_effort="none", **kwargs).endswith("<think>\n")


@pytest.mark.parametrize(
    ("name", "value"), [("tokenize", False), ("chat_template", "hi"), ("max_length", 2)]
)
def test_what_is_no_variable_of_a_template_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(chat_template_kwargs={"thinks": True, name: value})
    assert str(caught.value) == (
        f"chat_template_kwargs: {name} is no variable of a chat template; leave it out"
    )


def test_plain_answers_have_no_form() -> None:
    assert form("json_tools") is None
    assert form("json_tools", tools=[tool()], tool_choice="none") is None


def test_the_form_has_the_markers_that_may_occur() -> None:
    calls = form("json_tools", tools=[tool()])
    assert calls is not None
    assert calls.markup.after("content") == {"<tool_call>": "call"}
    assert calls.markup.after("call") == {"</tool_call>": "content"}
    thoughts = form("json_tools", thinking=True)
    assert thoughts is not None
    assert thoughts.markup.after("content") == {"<think>": "reasoning", "</think>": "content"}
    assert thoughts.markup.after("reasoning") == {"</think>": "content"}
    assert thoughts.read_call is None
    bare = form("", tools=[tool()])
    assert bare is not None
    assert bare.markup.bare


@pytest.mark.parametrize(
    ("fields", "parallel"),
    [
        ({}, True),
        ({"parallel_tool_calls": False}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
    ],
)
def test_the_form_takes_one_call_where_the_request_asks_for_one(
    fields: dict[str, Any], parallel: bool
) -> None:
    found = form("json_tools", tools=[tool()], **fields)
    assert found is not None
    assert found.parallel == parallel


def test_the_form_tells_whether_the_prompt_has_opened_the_thinking() -> None:
    def thinks(**fields: Any) -> bool:
        found = form("json_tools", thinking=True, **fields)
        assert found is not None
        return found.markup.first == "reasoning"

    assert not thinks()
    assert thinks(**OPENED)
    assert not thinks(reasoning_effort="none", **OPENED)


@pytest.mark.parametrize("kwargs", [{}, OPENED])
def test_markers_in_messages_neither_open_nor_close_the_thinking(kwargs: dict[str, Any]) -> None:
    for text in ("What does <think> do?", "And </think>?", "<think>"):
        asked = {"messages": [{"role": "user", "content": text}], **kwargs}
        found = form("json_tools", thinking=True, **asked)
        assert found is not None
        assert (found.markup.first == "reasoning") == bool(kwargs)


def test_thinking_that_a_template_opens_unasked_is_seen() -> None:
    tokenizer = tokenizer_of(
        "json_tools", thinking=True, template="{{ messages[0].content }}: <think>\n"
    )
    chat, request = Chat(tokenizer, "m"), ask()
    found = chat.reply(request, chat.text(request))
    assert found is not None
    assert found.markup.first == "reasoning"


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none", "tools": [tool(strict=True)]}, False),
        ({"tools": [tool(strict=True)]}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"response_format": AS_JSON}, True),
    ],
)
def test_calls_are_held_to_a_grammar_where_the_request_asks_for_it(
    fields: dict[str, Any], held: bool
) -> None:
    found = constraint("json_tools", **{"tools": [tool()], **fields})
    assert (found is not None) == held
    assert found is None or found.kind == "grammar"


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        (
            "gemma4",
            {"tool_choice": "required"},
            "tool_choice: calls by m cannot be held to their schemas, because no grammar of their "
            'syntax is known; give "auto"',
        ),
        (
            "gemma4",
            {"tools": [tool(strict=True)]},
            "tools: calls by m cannot be held to their schemas, because no grammar of their syntax "
            "is known; leave strict out",
        ),
        (
            "",
            {"response_format": {"type": "json_object"}},
            "response_format: calls by m cannot be held to their schemas, because they look like "
            "an answer in JSON; leave it or the tools out",
        ),
        (
            "qwen3_coder",
            {
                "tools": [
                    tool(parameters={"properties": {"a": {"type": "string", "format": "date"}}})
                ],
                "tool_choice": "required",
            },
            "tool_choice: calls by m cannot be held to their schemas, because the text 'a' has the "
            'keyword format; give "auto"',
        ),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_sentence(
    family: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(family, **{"tools": [tool()], **fields})
    assert str(caught.value) == sentence


def test_a_chat_shares_with_others_what_comes_before_its_first_question() -> None:
    tokenizer = tokenizer_of("json_tools")
    chat = Chat(tokenizer, "m")
    system = {"role": "system", "content": "Answer in one word."}
    asked = [ask(messages=[system, {"role": "user", "content": text}]) for text in ("yes?", "no?")]
    prompts = [chat.encode(chat.text(request)) for request in asked]

    shared = [chat.shared(*pair) for pair in zip(asked, prompts, strict=True)]

    assert shared[0] == shared[1] > 0
    assert prompts[0][: shared[0]] == prompts[1][: shared[0]]
    assert "one word." in tokenizer.decode(prompts[0][: shared[0]])
    assert "yes" not in tokenizer.decode(prompts[0][: shared[0]])


def test_a_chat_without_a_system_message_shares_nothing_that_is_known() -> None:
    chat = Chat(tokenizer_of("json_tools"), "m")
    request = ask()

    assert chat.shared(request, chat.encode(chat.text(request))) == 0


def test_a_chat_that_its_template_refuses_takes_nothing_from_those_after_it() -> None:
    tokenizer = tokenizer_of("json_tools")
    chat = Chat(tokenizer, "m")
    plain = ask(messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    prompt = chat.encode(chat.text(plain))
    wanted = chat.shared(plain, prompt)

    with patch.object(tokenizer._tokenizer, "apply_chat_template", side_effect=ValueError):
        other = ask(messages=[{"role": "system", "content": "Be long."}, *HELLO])
        assert chat.shared(other, prompt) == 0

    assert chat.shared(plain, prompt) == wanted > 0
