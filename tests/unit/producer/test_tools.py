"""Tools and their calls are taken in OpenAI's form, or refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.wire import (
    MAX_PROMPT_CHARACTERS,
    FunctionDefinition,
    GenerationRequest,
    Tool,
    ToolChoice,
)
from omlx_producer.wire.remedy import remedy_of
from omlx_producer.wire.tools import MAX_TOOLS, ChosenFunction
from tests.helpers.requests import refusal

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call(arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function} | fields


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [*CHAT["messages"], fields]}


def parse(**fields: Any) -> GenerationRequest:
    return GenerationRequest.parse(CHAT | fields)


@pytest.mark.parametrize(
    ("fields", "names", "required", "parallel"),
    [
        ({}, ["f", "g"], False, True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["f", "g"], False, False),
        ({"tool_choice": "required"}, ["f", "g"], True, True),
        ({"tool_choice": chosen("g")}, ["g"], True, False),
    ],
)
def test_tools_and_their_choice_say_what_may_be_called(
    fields: dict[str, Any], names: list[str], required: bool, parallel: bool
) -> None:
    request = parse(tools=[tool("f"), tool("g")], **fields)
    again = GenerationRequest.parse(json.loads(json.dumps(request.to_wire())))
    assert request == again
    calling = again.calling
    assert calling is not None
    assert [function.name for function in calling.functions] == names
    assert (calling.required, calling.parallel) == (required, parallel)


def test_nothing_may_be_called_without_tools_or_when_the_choice_is_none() -> None:
    assert parse().calling is None
    assert parse(tools=[], tool_choice="none", parallel_tool_calls=False).to_wire() == CHAT
    assert parse(tools=[tool()], tool_choice="none").calling is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{}]}, 'tools[0].type: missing; give "function", the only one that is served'),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools[0].type: got 'custom'; give \"function\", the only one that is served",
        ),
        (
            {"tools": [tool("two words")]},
            "tools[0].function.name: got 'two words'; give 1 to 64 letters, digits, _ and -",
        ),
        (
            {"tools": [tool("f"), tool("f")]},
            "tools[1].function.name: got 'f' a second time; rename one of the two",
        ),
        (
            {"tools": [tool(parameters={"type": "string"})]},
            "tools[0].function.parameters.type: got 'string'; give 'object'",
        ),
        (
            {"tools": [tool(parameters=[])]},
            "tools[0].function.parameters: got []; give a JSON schema such as "
            '{"type": "object", "properties": {}}',
        ),
        ({"tool_choice": "auto"}, "tool_choice: given without tools; give tools too"),
        (
            {"tools": [tool("f"), tool("g")], "tool_choice": chosen("h")},
            "tool_choice.function.name: got 'h', which is none of the tools; give one of f, g",
        ),
        (
            {"tools": [tool()], "tool_choice": "always"},
            'tool_choice: got \'always\'; give "auto", "none", "required" or '
            '{"type": "function", "function": {"name": "f"}}',
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "function"}},
            'tool_choice.function: missing; give a function such as {"name": "f"}',
        ),
        (
            {"tools": [tool()], "tool_choice": "required", "ignore_eos": True},
            "ignore_eos: got true beside tool_choice, which says where the text ends; "
            "leave one of the two out",
        ),
        (
            {"tools": [tool("f"), tool("g", strict=True)], "ignore_eos": True},
            "ignore_eos: got true beside strict in tools, which says where the text ends; "
            "leave one of the two out",
        ),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort: got 'huge'; "
            "give one of none, minimal, low, medium, high, xhigh and max",
        ),
        (
            turn(role="assistant", content=None, tool_calls=[call("{")]),
            "messages[1].tool_calls[0].function.arguments: got '{'; give a JSON object as text",
        ),
        (
            turn(role="assistant", content=None, tool_calls=[call("[1]")]),
            "messages[1].tool_calls[0].function.arguments: got '[1]'; give a JSON object as text",
        ),
        (
            turn(role="user", content="x", tool_calls=[call()]),
            "messages[1].tool_calls: given in a message of the user; only the assistant calls",
        ),
        (
            turn(role="user", content="x", tool_call_id="call_1"),
            "messages[1].tool_call_id: given in a message of the user; give it in those of a tool",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_sentence(
    fields: dict[str, Any], sentence: str
) -> None:
    assert refusal(CHAT | fields) == sentence


def test_tools_without_a_chat_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^tools: given with a prompt; give messages"):
        GenerationRequest.parse({"model": "demo", "prompt": "x", "tools": [tool()]})


def test_too_many_or_too_long_tools_are_refused() -> None:
    assert refusal(CHAT | {"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}).startswith(
        "tools: got ["
    )
    long = [tool(f"f{n}", description="x" * 90_000) for n in range(5)]
    assert refusal(CHAT | {"tools": long}).startswith("tools: got 450")


def test_calls_and_their_answers_travel() -> None:
    conversation = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": 5}')]},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    request = GenerationRequest.parse({"model": "demo", "messages": conversation})
    again = GenerationRequest.parse(json.loads(json.dumps(request.to_wire())))
    assert request == again
    assert again.messages is not None
    _, turn, answer = again.messages
    assert turn.text == ""
    assert turn.tool_calls is not None
    assert turn.tool_calls[0].function.parsed == {"x": 5}
    assert (answer.tool_call_id, answer.text) == ("call_1", "7")


def test_the_arguments_of_calls_count_as_text() -> None:
    long = call('{"x": "' + "y" * MAX_PROMPT_CHARACTERS + '"}')
    sentence = refusal(CHAT | turn(role="assistant", content=None, tool_calls=[long]))
    assert sentence.startswith(f"messages: got {MAX_PROMPT_CHARACTERS + 10} characters; give at")


@pytest.mark.parametrize("model", [FunctionDefinition, Tool, ToolChoice, ChosenFunction])
def test_every_field_of_a_tool_says_what_it_should_hold(model: Any) -> None:
    assert all(map(remedy_of, model.model_fields.values()))
