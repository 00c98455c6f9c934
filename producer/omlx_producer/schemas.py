"""JSON schemas whose answers end: a short form, and bounds where a schema has none.

A small model may write digits or a text without end where a schema allows that.
"""

from __future__ import annotations

import re
from typing import Any

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.json_schema import NAMED

MAX_TEXT = 1000
"""Characters of a text that a schema does not limit."""

MAX_NUMBER = 10**15
"""The magnitude of a number that a schema does not limit; exact in any JSON reader."""

SMALLEST_STEP = 1e-9
"""Between numbers that a schema does not limit: it bounds their digits behind the point."""

_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_NAME = re.compile(r"[^\W\d][\w-]*")
_ENDS = {"maxLength", "pattern", "format", "enum", "const"}
_LEAST, _MOST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
_COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"}
_INNER = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")


def short_schema(text: str) -> dict[str, Any]:
    """The schema of a short form: fields of an object, all required.

    Fields are separated by commas, or are lines if there are several. Each is a name, a type
    (``int``, ``float``, ``bool``, ``str`` by default) and, after a colon, a description.

    >>> short_schema("name, year int")["required"]
    ['name', 'year']

    Raises:
        InvalidRequest: names the field that cannot be read.
    """
    properties: dict[str, Any] = {}
    for field in filter(None, map(str.strip, re.split("\n" if "\n" in text else ",", text))):
        words, _, description = field.partition(":")
        name, *kinds = words.split() or [""]
        if not _NAME.fullmatch(name) or len(kinds) > 1:
            raise InvalidRequest(
                None, f"got {field!r}", "give a file, or fields such as: name, year int"
            )
        kind = kinds[0] if kinds else "str"
        if kind not in _TYPES:
            raise InvalidRequest(None, f"{name}: got {kind!r}", f"give {', '.join(_TYPES)}")
        if name in properties:
            raise InvalidRequest(None, f"{name}: is there twice", "give it once")
        properties[name] = {"type": _TYPES[kind]}
        if description.strip():
            properties[name]["description"] = description.strip()
    if not properties:
        raise InvalidRequest(None, f"got {text!r}", "give fields such as: name, year int")
    return bounded({"type": "object", "properties": properties, "required": list(properties)})


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with limits added to texts and numbers that have none, and additionalProperties
    false to objects that list their properties. Keywords that are given stay."""
    kinds = schema.get("type", ())
    kinds = kinds if isinstance(kinds, list) else [kinds]
    made = dict(schema)
    if "string" in kinds and not _ENDS & schema.keys():
        made["maxLength"] = MAX_TEXT
    if {"integer", "number"} & set(kinds) and not {"enum", "const"} & schema.keys():
        # Beside a given bound that is larger, there must be room for numbers.
        given = [schema[name] for name in _LEAST | _MOST if name in schema]
        sizes = [2 * abs(bound) for bound in given if isinstance(bound, int | float)]
        most = max([MAX_NUMBER, *sizes])
        if not _LEAST & schema.keys():
            made["minimum"] = -most
        if not _MOST & schema.keys():
            made["maximum"] = most
        if "number" in kinds:
            made.setdefault("multipleOf", SMALLEST_STEP)
    if "object" in kinds and "properties" in schema and not _COMBINED & schema.keys():
        made["additionalProperties"] = False
    for keyword in NAMED:
        if isinstance(held := schema.get(keyword), dict):
            made[keyword] = {name: _inner(each) for name, each in held.items()}
    for keyword in _INNER:
        held = schema.get(keyword)
        if isinstance(held, list):
            made[keyword] = [_inner(each) for each in held]
        elif held is not None:
            made[keyword] = _inner(held)
    return made


def _inner(schema: Any) -> Any:
    return bounded(schema) if isinstance(schema, dict) else schema
