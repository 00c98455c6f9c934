"""The arguments of a function, one by one, for families that write them as pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omlx_producer.wire.json_schema import resolve

DEFINITIONS = ("$defs", "definitions")
_SIMPLE = frozenset({"string", "integer", "number", "boolean", "object", "array"})
_TELLING_NOTHING = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS})
_OF_TEXTS = frozenset({"type", "enum", "const", *DEFINITIONS})
_EITHER = ("anyOf", "oneOf")
_NULL = {"type": "null"}

MAX_STEPS = 16
"""References that are followed, each from the target of the one before."""


class NotWritable(ValueError):
    """What a syntax of calls cannot express. The message completes "because ..."."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument.

    Attributes:
        schema: complete with the definitions that it refers to.
        type: of JSON; None if it has several, or it cannot be told.
        nullable: whether null is another value.
    """

    key: str
    schema: dict[str, Any]
    required: bool
    type: str | None
    nullable: bool

    @property
    def texts(self) -> list[str] | None:
        """The only values of a text; None if any text is one.

        Raises:
            NotWritable: if the schema asks for more of a text.
        """
        schema, _ = _resolved(self.schema, self.schema)
        for keyword in schema:
            if keyword not in _OF_TEXTS | _TELLING_NOTHING:
                raise NotWritable(f"the text {self.key!r} has the keyword {keyword}")
        values = _values(schema)
        if values is None:
            return None
        texts = [value for value in values if isinstance(value, str)]
        if not texts:
            raise NotWritable(f"the text {self.key!r} can have no value")
        return texts


def parameters_of(schema: dict[str, Any]) -> list[Parameter]:
    """The arguments that a schema of a function's parameters names, in its order."""
    root = {name: schema[name] for name in DEFINITIONS if name in schema}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    found = []
    for key, inner in properties.items():
        # References are to the definitions of the root.
        whole = {**inner, **root} if isinstance(inner, dict) else dict(root)
        kind, nullable = _kind(whole)
        needed = isinstance(required, list) and key in required
        found.append(Parameter(key, whole, needed, kind, nullable))
    return found


def require_pairs(schema: dict[str, Any], parameters: Sequence[Parameter]) -> None:
    """Check that pairs can hold all that a schema of parameters asks for.

    Raises:
        NotWritable: if they cannot.
    """
    for keyword in schema:
        if keyword not in _OF_OBJECTS | _TELLING_NOTHING:
            raise NotWritable(f"its parameters have the keyword {keyword}")
    missing = set(schema.get("required") or ()) - {parameter.key for parameter in parameters}
    if missing:
        raise NotWritable(f"the required parameter {min(missing)!r} is none of its properties")
    for reference in _references(schema):
        if not reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            raise NotWritable(f"its parameters refer to {reference!r:.60}")


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _kind(schema: dict[str, Any]) -> tuple[str | None, bool]:
    """The type of a schema's values, and whether null is another."""
    schema, nullable = _resolved(schema, schema)
    kinds = [name for name in _types(schema) if name != "null"]
    kind = kinds[0] if len(kinds) == 1 else None
    values = _values(schema)
    may_be_text = "type" not in schema or "string" in kinds
    if may_be_text and values and all(isinstance(value, str) for value in values):
        kind = "string"
    nullable = nullable or (_takes_null(schema) and "type" in schema)
    return (kind if kind in _SIMPLE else None), nullable


def _types(schema: dict[str, Any]) -> list[Any]:
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The only values that a schema lists; None if it lists none."""
    values = schema.get("enum")
    if "const" in schema:
        return [each for each in [schema["const"]] if values is None or each in values]
    return values if isinstance(values, list) else None


def _takes_null(schema: dict[str, Any]) -> bool:
    values = _values(schema)
    right_type = "type" not in schema or "null" in _types(schema)
    return right_type and (values is None or None in values)


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A schema without references and without null as an alternative, and whether it had one."""
    nullable = False
    for _ in range(MAX_STEPS):
        inner: Any
        if isinstance(reference := schema.get("$ref"), str):
            keyword, inner = "$ref", _target(reference, root)
        elif len(schema.get("allOf", ())) == 1:
            keyword, [inner] = "allOf", schema["allOf"]
        elif found := next((name for name in _EITHER if _is_nullable(schema.get(name))), None):
            keyword, nullable = found, nullable or _takes_null(schema)
            inner = next((choice for choice in schema[found] if choice != _NULL), _NULL)
        else:
            break
        if not isinstance(inner, dict):
            return {}, nullable
        rest = {name: value for name, value in schema.items() if name != keyword}
        schema = inner | rest | _in_both(inner, rest)
    return schema, nullable


def _in_both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The types and values of two schemas that both hold."""
    made = dict[str, Any]()
    if "type" in one and "type" in other:
        made["type"] = [each for each in _types(one) if each in _types(other)]
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        made["enum"] = [each for each in values if each in others]
    return made


def _is_nullable(choices: Any) -> bool:
    return isinstance(choices, list) and len(choices) == 2 and _NULL in choices


def _target(reference: str, root: dict[str, Any]) -> Any:
    try:
        return resolve(reference, root)
    except LookupError:
        return None


def simplified(parameters: Sequence[Parameter], texts: Collection[str] = ()) -> dict[str, Any]:
    """A schema with plain types, which is all that mlx-lm's parsers look at.

    Args:
        texts: types that it calls texts.
    """
    properties: dict[str, Any] = {}
    for parameter in parameters:
        kind = "string" if parameter.type in texts else parameter.type
        properties[parameter.key] = {"type": kind} if kind else parameter.schema
    return {"type": "object", "properties": properties}
