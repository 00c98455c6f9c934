"""JSON schemas as public suites have them, made at random, and texts that must match them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

NAMES = (
    *("id", "name", "city", "total_amount", "is_active", "created_at", "items", "price"),
    *("unit-code", "líne", "user name", "status", "latitude", "children", "kind", "note"),
)
PATTERNS = (
    *(r"^[A-Z]{2}-\d{3}$", r"^\d{4}-\d{2}$", r"^(foo|bar)+$", r"^[a-f0-9]{8}$", r"^#?[0-9A-F]{6}$"),
    *(r"^[a-z]+(\.[a-z]+){0,2}@x\.org$", r"\d", "^$|^yes$"),
)


def schema(seed: int) -> Schema:
    """A schema that is small enough for a model of a few tokens' memory to fill in."""
    rng = random.Random(seed)
    maker = rng.choice([_object, _object, _object, _array, _union, _recursive, _shared, _list])
    return maker(rng, 2)


def faults(schema: Schema, text: str) -> list[str]:
    """Why a text does not match; empty if it does.

    Numbers are taken as written: as a double, 2.4999999999999999999 is not below 2.5.
    """
    try:
        value = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        return [f"{error}: {text}"]
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def _any(rng: random.Random, depth: int) -> Schema:
    scalars = [_string, _string, _pattern, _integer, _number, _enum, _boolean, _format]
    nested = [_object, _array, _union, _list]
    return rng.choice(scalars + (nested if depth > 0 else []))(rng, depth - 1)


def _string(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}


def _pattern(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 24}


def _format(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])}


def _integer(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(-50, 50)
    bounds = [
        {"minimum": least, "maximum": least + rng.randrange(300)},
        {"exclusiveMinimum": least, "maximum": least + 40},
        {"minimum": 0, "maximum": 1000, "multipleOf": rng.choice([5, 7])},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random, _: int) -> Schema:
    least = rng.randrange(-10, 10)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + rng.choice([1, 2.5])}


def _enum(rng: random.Random, _: int) -> Schema:
    values = ["red", "green", 'a "quoted" one', "ünïcode", 1, 2.5, None, True, "a\\b", [1, "x"]]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _boolean(rng: random.Random, _: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": ["boolean", "null"]}, {"const": "fixed"}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    made: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        made |= {"title": "A title", "description": "Says nothing of the form.", "$comment": "x"}
    return made


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    most = least + rng.randrange(3)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": most}


def _list(rng: random.Random, depth: int) -> Schema:
    """An array whose first items have forms of their own."""
    first = [_any(rng, depth) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _union(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_object, _integer, _string, _enum]
    return {"anyOf": [maker(rng, depth) for maker in rng.sample(makers, rng.randrange(2, 4))]}


def _shared(rng: random.Random, depth: int) -> Schema:
    """An object whose properties refer to definitions."""
    names = rng.sample(NAMES, 3)
    made = _object(rng, 0)
    made["properties"] |= {name: {"$ref": f"#/$defs/{i}"} for i, name in enumerate(names)}
    made["required"] = names
    return made | {"$defs": {str(i): _any(rng, depth) for i in range(3)}}


def _recursive(rng: random.Random, _: int) -> Schema:
    """A tree whose nodes may end at any level."""
    node: Schema = {
        "type": "object",
        "properties": {
            "value": _any(rng, 0),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value", rng.choice(["next", "children"])],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
