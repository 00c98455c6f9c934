"""Checks of JSON schemas that need no compiler: size, depth, types and references."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.request_part import json_text, levels

MAX_CONSTRAINT_CHARACTERS = 100_000
MAX_SCHEMA_LEVELS = 64
MAX_PATH = 120

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# The keywords whose values hold schemas: by name (NAMED), in a list, or one.
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else"),
)


def require_schema(field: str, schema: dict[str, Any]) -> str:
    """Check a JSON schema as far as one can without compiling it; returns it as JSON text.

    Raises:
        ValueError: if it cannot be sent, is too long or too deep, or is certainly no schema. The
            message begins with the path to the problem.
    """
    text = json_text(field, schema)
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise InvalidRequest(
            field,
            f"got a schema of {len(text)} characters",
            f"give at most {MAX_CONSTRAINT_CHARACTERS}",
        )
    if (depth := levels(schema)) > MAX_SCHEMA_LEVELS:
        raise InvalidRequest(
            field,
            f"got a schema of {depth} levels",
            f"give at most {MAX_SCHEMA_LEVELS}, as with $defs and $ref",
        )
    for path, problem in _problems(schema, field, schema):
        shown = path if len(path) <= MAX_PATH else f"{path[:MAX_PATH]}..."
        raise InvalidRequest(shown, problem)
    return text


def _problems(schema: Any, path: str, root: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong, with the path to it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, f"got {reprlib.repr(schema)}; give a JSON schema"
        return
    yield from _own_problems(schema, path, root)
    for keyword in NAMED:
        held = schema.get(keyword, {})
        if not isinstance(held, dict):
            yield f"{path}.{keyword}", f"got {reprlib.repr(held)}; give an object of JSON schemas"
            continue
        for name, inner in held.items():
            step = name if str(name).isprintable() else repr(name)
            yield from _problems(inner, f"{path}.{keyword}.{step}", root)
    for keyword in (*_LISTED, *_SINGLE):
        if keyword not in schema:
            continue
        held = schema[keyword]
        if keyword in _LISTED and not isinstance(held, list):
            yield f"{path}.{keyword}", f"got {reprlib.repr(held)}; give a list of JSON schemas"
        elif isinstance(held, list) and keyword in (*_LISTED, "items"):
            for index, inner in enumerate(held):
                yield from _problems(inner, f"{path}.{keyword}[{index}]", root)
        else:
            yield from _problems(held, f"{path}.{keyword}", root)


def _own_problems(
    schema: dict[str, Any], path: str, root: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in _TYPES:
            yield f"{path}.type", f"got {reprlib.repr(kind)}; give one of {', '.join(_TYPES)}"
    if not isinstance(schema.get("enum", []), list):
        yield f"{path}.enum", f"got {reprlib.repr(schema['enum'])}; give a list"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{path}.required", f"got {reprlib.repr(required)}; give a list of names"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and not _exists(reference, root):
        yield f"{path}.$ref", f"got {reprlib.repr(reference)}, which the schema does not have"


def _exists(reference: str, root: dict[str, Any]) -> bool:
    """Whether a schema has what a JSON pointer into it names."""
    known, encoded, _ = reference.partition("%")
    if encoded:
        known = known.rpartition("/")[0]  # The encoded rest is left to the compiler.
    try:
        resolve(known, root)
    except LookupError:
        return False
    return True


def resolve(reference: str, root: Any) -> Any:
    """What a reference ``#`` or ``#/...`` names in a schema.

    Raises:
        LookupError: if the schema does not have it.
    """
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal():
            root = root[int(name)]
        elif isinstance(root, dict):
            root = root[name]
        else:
            raise LookupError(reference)
    return root
