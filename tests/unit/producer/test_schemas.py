"""Schemas in the short form, and the bounds of schemas that have none."""

from __future__ import annotations

from typing import Any

import pytest

from omlx_producer.errors import InvalidRequest
from omlx_producer.schemas import MAX_NUMBER, MAX_TEXT, bounded, short_schema

TEXT = {"type": "string", "maxLength": MAX_TEXT}
INTEGER = {"type": "integer", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}


def test_fields_are_required_texts_of_a_closed_object() -> None:
    assert short_schema("name, version, year int") == {
        "type": "object",
        "properties": {"name": TEXT, "version": TEXT, "year": INTEGER},
        "required": ["name", "version", "year"],
        "additionalProperties": False,
    }


def test_each_type_has_a_word() -> None:
    found = short_schema("a int, b float, c bool, d str")["properties"]
    assert [each["type"] for each in found.values()] == ["integer", "number", "boolean", "string"]


def test_numbers_have_a_largest_and_a_smallest_digit() -> None:
    assert short_schema("a float")["properties"]["a"] == {
        "type": "number",
        "minimum": -MAX_NUMBER,
        "maximum": MAX_NUMBER,
        "multipleOf": 1e-9,
    }


def test_lines_may_have_descriptions_with_commas() -> None:
    found = short_schema("\n  name: the first, and the last\n  year int: of birth\n")["properties"]
    assert found["name"] == {**TEXT, "description": "the first, and the last"}
    assert found["year"] == {**INTEGER, "description": "of birth"}
    assert short_schema("name: of the person, year int")["properties"].keys() == {"name", "year"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got ''; give fields such as: name, year int"),
        (" , ", "got ' , '; give fields such as: name, year int"),
        ("name, year date", "year: got 'date'; give int, float, bool, str"),
        ("the first name", "got 'the first name'; give a file, or fields such as: name, year int"),
        ("order.jso", "got 'order.jso'; give a file, or fields such as: name, year int"),
        ("name, 7 int", "got '7 int'; give a file, or fields such as: name, year int"),
        ("name, name int", "name: is there twice; give it once"),
    ],
)
def test_what_is_no_short_form_is_told_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        short_schema(text)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "a+"},
        {"type": "string", "enum": ["a"]},
        {"type": "string", "format": "date"},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 9},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {}, "allOf": [{"type": "object"}]},
        {"type": "boolean"},
        {"$ref": "#/$defs/a"},
    ],
)
def test_what_a_schema_says_itself_stays(schema: dict[str, Any]) -> None:
    assert bounded(schema) == schema


@pytest.mark.parametrize("given", [{"minimum": 2 * MAX_NUMBER}, {"exclusiveMaximum": -1e18}])
def test_a_large_bound_leaves_numbers_within_it(given: dict[str, Any]) -> None:
    found = bounded({"type": "integer", **given})
    least, most = found["minimum"], found.get("maximum", found.get("exclusiveMaximum"))
    assert given.items() <= found.items()
    assert least < most


def test_bounds_reach_all_that_a_schema_holds() -> None:
    text, closed = {"type": "string"}, {"type": "object", "properties": {}}
    found = bounded(
        {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": {"type": "object", "properties": {"a": text}}},
                "either": {"anyOf": [text, {"type": ["integer", "null"]}, True]},
            },
            "$defs": {"b": closed},
        }
    )
    rows = found["properties"]["items"]["items"]
    assert (rows["properties"], rows["additionalProperties"]) == ({"a": TEXT}, False)
    nullable = {**INTEGER, "type": ["integer", "null"]}
    assert found["properties"]["either"]["anyOf"] == [TEXT, nullable, True]
    assert found["$defs"]["b"] == {**closed, "additionalProperties": False}
