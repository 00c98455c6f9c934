"""What an answer must match becomes one constraint, or the request is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.wire import GenerationRequest, NamedSchema, ResponseFormat, StructuredOutputs
from omlx_producer.wire.json_schema import MAX_CONSTRAINT_CHARACTERS
from omlx_producer.wire.remedy import remedy_of
from omlx_producer.wire.structure import Constraint
from tests.helpers.requests import refusal

OK = {"model": "demo", "prompt": "x"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOLS = {
    "model": "demo",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def formatted(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA} | schema}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object")),
        (
            {"response_format": formatted(strict=True, description="an answer")},
            Constraint("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        (
            {"structured_outputs": {"json": {"type": "integer"}}},
            Constraint("json_schema", '{"type":"integer"}'),
        ),
        (
            {"structured_outputs": {"json": '{"type": "integer"}'}},
            Constraint("json_schema", '{"type":"integer"}'),
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, Constraint("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["é", "no"]}}, Constraint("choice", '["é","no"]')),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Constraint("grammar", 'start: "a"'),
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            Constraint("regex", "a"),
        ),
    ],
)
def test_a_form_becomes_one_constraint_and_travels(
    fields: dict[str, Any], constraint: Constraint | None
) -> None:
    request = GenerationRequest.parse(OK | fields)
    again = GenerationRequest.parse(json.loads(json.dumps(request.to_wire())))
    assert request.constraint == again.constraint == constraint


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"response_format": "text"},
            'response_format: got \'text\'; give an object such as {"type": "json_object"}',
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: got 'xml'; give one of text, json_object and json_schema",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema: missing; give it, as the type is json_schema",
        ),
        (
            {"response_format": formatted() | {"type": "json_object"}},
            "response_format.json_schema: given with the type json_object; "
            'give the type "json_schema"',
        ),
        (
            {"response_format": formatted(schema=[1])},
            "response_format.json_schema.schema: got [1]; give a JSON schema such as "
            '{"type": "object", "properties": {"name": {"type": "string"}}}',
        ),
        (
            {"response_format": formatted(name="two words")},
            "response_format.json_schema.name: got 'two words'; "
            "give 1 to 64 letters, digits, _ and -",
        ),
        (
            {"response_format": formatted(schema=nested(65))},
            "response_format.json_schema.schema: got a schema of 65 levels; give at most 64, "
            "as with $defs and $ref",
        ),
        (
            {"response_format": formatted(schema={"a": float("nan")})},
            "response_format.json_schema.schema: cannot be sent as JSON "
            "(Out of range float values are not JSON compliant); change it",
        ),
        (
            {"response_format": formatted(schema={"enum": ["x" * 100] * 1000})},
            "response_format.json_schema.schema: got a schema of 103010 characters; "
            "give at most 100000",
        ),
        (
            {"structured_outputs": {}},
            "structured_outputs: got none of them; "
            "give exactly one of json, regex, choice and grammar",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs: got regex and choice; "
            "give exactly one of json, regex, choice and grammar",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json: got '{'; give a JSON schema such as "
            '{"type": "object", "properties": {"name": {"type": "string"}}}',
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice: got []; give a list of at least one text, "
            "none of them empty",
        ),
        (
            {"structured_outputs": {"choice": ["x" * 60_000] * 2}},
            "structured_outputs.choice: got more than 100000 characters; "
            "give fewer or shorter texts",
        ),
        (
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp: unknown field; did you mean regex?",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": formatted()},
            "structured_outputs: given beside response_format; leave one of the two out",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos: got true beside structured_outputs, which says where the text ends; "
            "leave one of the two out",
        ),
    ],
)
def test_a_form_that_cannot_be_served_is_refused_in_one_sentence(
    fields: dict[str, Any], sentence: str
) -> None:
    assert refusal(OK | fields) == sentence


def test_a_long_pattern_is_refused_without_repeating_it() -> None:
    sentence = refusal(
        OK | {"structured_outputs": {"regex": "a" * (MAX_CONSTRAINT_CHARACTERS + 1)}}
    )
    assert sentence == (
        "structured_outputs.regex: got 100001 characters; "
        "give a regular expression of 1 to 100000 characters"
    )


@pytest.mark.parametrize("levels", [500, 5000])
def test_a_schema_nested_too_deeply_to_be_read_is_refused(levels: int) -> None:
    sentence = refusal(OK | {"response_format": formatted(schema=nested(levels))})
    assert sentence == "response_format: got more than 100 levels; give at most 100"


def test_an_answer_as_json_goes_with_tools_unless_one_must_be_called() -> None:
    both = TOOLS | {"response_format": formatted()}
    assert GenerationRequest.parse(both).constraint
    with pytest.raises(InvalidRequest, match=r"^response_format: given beside tools of which one"):
        GenerationRequest.parse(both | {"tool_choice": "required"})
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: given beside tools of which"):
        GenerationRequest.parse(TOOLS | {"structured_outputs": {"regex": "a"}})
    none = TOOLS | {"structured_outputs": {"regex": "a"}, "tool_choice": "none"}
    assert GenerationRequest.parse(none).constraint == Constraint("regex", "a")


@pytest.mark.parametrize("model", [NamedSchema, ResponseFormat, StructuredOutputs])
def test_every_field_of_a_form_says_what_it_should_hold(model: Any) -> None:
    assert all(map(remedy_of, model.model_fields.values()))
