"""Mistakes in a schema are told at submission, with the path to them, if no compiler is needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.wire.json_schema import require_schema

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "$ref", "$defs", "required", "x"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["string", "null"]},
        {"properties": {"type": {"type": "string"}, "enum": {"enum": ["type", 5]}}},
        {"items": [{"type": "string"}, True], "additionalProperties": False},
        {"enum": [{"type": "int"}], "const": {"type": "int"}, "default": {"$ref": "#/no"}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}], "not": {"$ref": "#/anyOf/0"}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}},
    ],
)
def test_a_schema_is_taken(schema: dict[str, Any]) -> None:
    assert require_schema("schema", schema)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (
            {"properties": {"age": {"type": "int"}}},
            "schema.properties.age.type: got 'int'; "
            "give one of string, number, integer, boolean, object, array, null",
        ),
        (
            {"anyOf": [{}, {"type": ["string", 5]}]},
            "schema.anyOf[1].type: got 5; "
            "give one of string, number, integer, boolean, object, array, null",
        ),
        ({"properties": ["a"]}, "schema.properties: got ['a']; give an object of JSON schemas"),
        ({"properties": {"a": "text"}}, "schema.properties.a: got 'text'; give a JSON schema"),
        ({"oneOf": {}}, "schema.oneOf: got {}; give a list of JSON schemas"),
        ({"items": {"required": "a"}}, "schema.items.required: got 'a'; give a list of names"),
        ({"required": [{}]}, "schema.required: got [{}]; give a list of names"),
        ({"enum": "a"}, "schema.enum: got 'a'; give a list"),
        (
            {"items": {"$ref": "#/$defs/b"}, "$defs": {"a": {}}},
            "schema.items.$ref: got '#/$defs/b', which the schema does not have",
        ),
        (
            {"$ref": "#/none/a%20b"},
            "schema.$ref: got '#/none/a%20b', which the schema does not have",
        ),
        ({"properties": {"a\nb": 5}}, "schema.properties.'a\\nb': got 5; give a JSON schema"),
        (
            {"properties": {"x" * 500: 5}},
            f"schema.properties.{'x' * 102}...: got 5; give a JSON schema",
        ),
    ],
)
def test_a_mistake_is_told_with_its_path(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="schema") as caught:
        require_schema("schema", schema)
    assert str(caught.value) == sentence


@given(st.dictionaries(st.sampled_from(["type", "properties", "anyOf", "$ref", "items"]), ANY))
def test_anything_is_taken_or_refused_in_one_line(schema: dict[str, Any]) -> None:
    sentence = "schema"
    try:
        require_schema("schema", schema)
    except ValueError as error:
        sentence = str(error)
    assert sentence.startswith("schema")
    assert sentence.isprintable()
    assert len(sentence) < 400
