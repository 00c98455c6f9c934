"""A grammar admits the calls that a family's parser reads, and only those."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher

from omlx_producer.wire import Calling, Constraint, FunctionDefinition
from omlx_worker.engine.rows.lark import Spelling
from omlx_worker.engine.rows.tools.grammar import CallGrammar
from omlx_worker.engine.rows.tools.parameters import NotWritable
from omlx_worker.engine.rows.tools.reading import CallReader
from tests.helpers.chats import (
    ADDED,
    PAIRED,
    syntax,
    tokenizer_of,
    vocabulary,
    written,
    written_all,
)

WRITTEN = [family for family in ADDED if family != "gemma4"]

WEATHER = FunctionDefinition(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "a town"},
            "days": {"$ref": "#/$defs/days"},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": ["boolean", "null"]},
            "spots": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "dates": {"type": "array", "items": {"type": "string", "format": "date"}},
        },
        "required": ["place", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
)
CLOCK = FunctionDefinition(name="get_time", parameters=None)
TEXT = {"type": "string"}
BOTH = (WEATHER, CLOCK)
PARIS = {
    **{"place": "Paris <é>", "days": 3, "unit": "C", "exact": None},
    **{"spots": ["a b"], "dates": ["2024-02-29"]},
}


def grammar(
    family: str, functions: Sequence[FunctionDefinition] = BOTH, *, parallel: bool = True
) -> CallGrammar:
    calling = Calling(tuple(functions), required=True, parallel=parallel)
    return CallGrammar(calling, syntax(family), Spelling(tokenizer_of(family).get_added_vocab()))


def admits(family: str, grammar: str, text: str) -> bool:
    """Whether the grammar takes a whole text, token by token, and may end there."""
    matcher = LLMatcher(vocabulary(tokenizer_of(family)), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer_of(family).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_weather", PARIS),
        ("get_weather", {"place": "x", "days": 9}),
        ("get_weather", {"place": "null", "days": 1, "exact": True}),
        ("get_time", {}),
    ],
)
def test_what_the_grammar_admits_is_read_again(
    family: str, name: str, arguments: dict[str, Any]
) -> None:
    text = written(syntax(family), name, arguments)
    assert admits(family, grammar(family).required(), text)
    inner = text.removeprefix(syntax(family).start).removesuffix(syntax(family).end)
    [call] = CallReader(tokenizer_of(family), BOTH).read(inner.strip("\n"))
    assert (call.name, call.parsed) == (name, arguments)


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_rain", {}),
        ("get_weather", {"place": "x"}),
        ("get_weather", {"place": "x", "days": 0}),
        ("get_weather", {"place": "x", "days": "3x"}),
        ("get_weather", {"place": "x", "days": 3, "unit": "K"}),
        ("get_weather", {"place": "x", "days": 3, "spots": []}),
        ("get_weather", {"place": "x", "days": 3, "dates": ["2023-02-29"]}),
        ("get_weather", {"place": "x", "days": 3, "more": 1}),
    ],
)
def test_other_calls_are_not_admitted(family: str, name: str, arguments: dict[str, Any]) -> None:
    text = written(syntax(family), name, arguments)
    assert not admits(family, grammar(family).required(), text)


@pytest.mark.parametrize("family", WRITTEN)
def test_a_required_call_is_no_text_and_is_repeated_only_in_parallel(family: str) -> None:
    call = written(syntax(family), "get_time", {})
    twice = written_all(syntax(family), ("get_time", {}), ("get_time", {}))
    assert not admits(family, grammar(family).required(), "It is late.")
    assert not admits(family, grammar(family).required(), "")
    assert admits(family, grammar(family).required(), twice) == syntax(family).repeats
    assert not admits(family, grammar(family, parallel=False).required(), twice)
    assert admits(family, grammar(family, parallel=False).required(), call)


BESIDE_TEXT = [family for family in WRITTEN if family != "harmony"]
"""Those whose calls stand in a text; on channels a call is a message of its own."""


@pytest.mark.parametrize("family", BESIDE_TEXT)
def test_free_text_may_hold_calls_that_are_right(family: str) -> None:
    free = grammar(family).free()
    call = written(syntax(family), "get_weather", PARIS)
    wrong = written(syntax(family), "get_rain", {})
    assert admits(family, free, "It is late.\n")
    assert admits(family, free, "")
    assert admits(family, free, call)
    assert not admits(family, free, wrong)
    if not syntax(family).bare:
        assert admits(family, free, f"I ask.\n{call}")
        assert not admits(family, free, f"I ask.\n{wrong}")


@pytest.mark.parametrize("family", [family for family in BESIDE_TEXT if ADDED[family]])
def test_a_marker_that_is_spelled_out_is_no_way_around_the_grammar(family: str) -> None:
    tokenizer = tokenizer_of(family)
    spelled = [
        token
        for character in written(syntax(family), "get_rain", {})
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]
    matcher = LLMatcher(
        vocabulary(tokenizer_of(family)), LLMatcher.grammar_from_lark(grammar(family).free())
    )
    assert matcher.try_consume_tokens(spelled) < len(syntax(family).start.encode())


@pytest.mark.parametrize("family", WRITTEN)
def test_an_answer_in_json_may_stand_in_place_of_calls(family: str) -> None:
    answer = Constraint("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}}))
    if syntax(family).bare:
        with pytest.raises(NotWritable, match="they look like an answer in JSON"):
            grammar(family).beside(answer)
        return
    either = grammar(family).beside(answer)
    assert admits(family, either, "[1, 2]")
    assert admits(family, either, written(syntax(family), "get_time", {}))
    assert not admits(family, either, "It is late.")
    assert not admits(family, either, '["a"]')


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "the text 'a' has the keyword pattern",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/t", "pattern": "x"}}, "$defs": {"t": TEXT}},
            "the text 'a' has the keyword pattern",
        ),
        (
            {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}], "minLength": 1}}},
            "the text 'a' has the keyword minLength",
        ),
        (
            {"properties": {"a": {"type": ["integer", "string"]}}},
            "the parameter 'a' may have several types",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/t", "type": "integer"}}, "$defs": {"t": TEXT}},
            "the parameter 'a' may have several types",
        ),
        (
            {"properties": {"a": {"type": "string", "enum": ["x"], "const": "y"}}},
            "the text 'a' can have no value",
        ),
        ({"properties": {"a": True}}, "the parameter 'a' may have several types"),
        ({"properties": {"a>": {"type": "integer"}}}, "the name 'a>' has other characters"),
        ({"anyOf": [{}]}, "its parameters have the keyword anyOf"),
        ({"properties": {}, "required": ["a"]}, "the required parameter 'a' is none of its"),
        (
            {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
            "its parameters refer to '#'",
        ),
    ],
)
def test_what_pairs_cannot_hold_is_refused_with_the_reason(
    family: str, parameters: dict[str, Any], reason: str
) -> None:
    function = FunctionDefinition(name="f", parameters=parameters)
    with pytest.raises(NotWritable, match=f"^{reason}"):
        grammar(family, [function])


@pytest.mark.parametrize("family", PAIRED)
def test_a_text_holds_no_marker_that_would_end_it(family: str) -> None:
    pairs = syntax(family).pairs
    assert pairs is not None
    for marker in (pairs.after.strip(), syntax(family).end):
        text = written(syntax(family), "get_weather", {"place": f"a{marker}b", "days": 1})
        assert not admits(family, grammar(family).required(), text)


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/t"}]},
        {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}], "description": "d"},
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]},
        {"$ref": "#/$defs/a~1b~0"},
    ],
)
def test_a_type_is_found_behind_references_and_alternatives(
    family: str, schema: dict[str, Any]
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"t": TEXT, "a/b~": TEXT}}
    function = FunctionDefinition(name="f", parameters=parameters)
    text = written(syntax(family), "f", {"a": "any text"})
    assert admits(family, grammar(family, [function]).required(), text)


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"$ref": "#/$defs/ab"}, ["a", "b"]),
        ({"$ref": "#/$defs/ab", "enum": ["b", "c"]}, ["b"]),
        ({"$ref": "#/$defs/ab", "const": "b"}, ["b"]),
        ({"$ref": "#/$defs/ab", "$defs": {"ab": {"enum": ["c"]}}}, ["a", "b"]),
        ({"anyOf": [{"$ref": "#/$defs/ab"}, {"type": "null"}]}, ["a", "b", None]),
        ({"anyOf": [{"$ref": "#/$defs/ab"}, {"type": "null"}], "enum": ["b"]}, ["b"]),
        ({"anyOf": [{"$ref": "#/$defs/ab"}, {"type": "null"}], "type": "string"}, ["a", "b"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None]),
    ],
)
def test_what_is_beside_a_reference_holds_too(
    family: str, schema: dict[str, Any], values: list[str | None]
) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"ab": {"enum": ["a", "b"]}}}
    function = FunctionDefinition(name="f", parameters=parameters)
    made = grammar(family, [function]).required()
    taken = [
        value
        for value in ("a", "b", "c", None)
        if admits(family, made, written(syntax(family), "f", {"x": value}))
    ]
    assert taken == values


@pytest.mark.parametrize("family", ["json_tools", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize("chosen", [[], ["a"], ["b"], ["a", "c"], ["b", "c"], ["a", "b", "c"]])
def test_any_optional_arguments_may_be_left_out(family: str, chosen: list[str]) -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    function = FunctionDefinition(name="f", parameters={"properties": properties})
    text = written(syntax(family), "f", dict.fromkeys(chosen, 1))
    assert admits(family, grammar(family, [function]).required(), text)


def test_a_pair_that_tells_its_type_holds_any_value_with_the_right_word() -> None:
    properties = {"a": {"type": ["integer", "string"]}, "b": {"type": ["string", "null"]}}
    function = FunctionDefinition(name="f", parameters={"properties": properties})
    made = grammar("dsml", [function]).required()
    for arguments in ({"a": 1}, {"b": "null"}, {"b": None}, {"a": 2, "b": "x"}):
        assert admits("dsml", made, written(syntax("dsml"), "f", arguments))
    text = written(syntax("dsml"), "f", {"a": 1})
    assert not admits("dsml", made, text.replace('string="false"', 'string="true"'))
    assert admits("dsml", made, text.replace(">1<", '>"1"<'))


@pytest.mark.parametrize("family", ["dsml", "deepseek_v31", "deepseek_r1", "command", "nemotron"])
def test_several_calls_share_one_section(family: str) -> None:
    form, calls = syntax(family), [("get_time", {}), ("get_weather", PARIS)]
    text = written_all(form, *calls)
    assert (text.count(form.start), text.count(form.end)) == (1, 1)
    assert admits(family, grammar(family).required(), text)
    assert admits(family, grammar(family).free(), f"I ask.{text}")
    assert not admits(family, grammar(family, parallel=False).free(), text)
