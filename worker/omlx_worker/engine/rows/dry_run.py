"""Compiles a grammar in a process of its own, over bytes in place of a model's tokens.

llguidance has no limit on time, and a hostile grammar overflows its stack, which ends the process
(seen with 1.9.1: chains of 5,000 references). So the worker runs this file before it compiles a
grammar itself. The system ends it with SIGXCPU when its CPU time is up.

It reads a JSON object: ``grammar`` in llguidance's own form, ``seconds`` of CPU time from then on,
``options`` of schemas, and ``schema`` if the grammar is one. It prints lines of JSON: why the
grammar cannot be compiled and the rule that is to blame, each empty if there is none; then, of a
schema that cannot, the path of the innermost part that is to blame.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from math import ceil
from resource import RLIMIT_CPU, setrlimit
from time import process_time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def error_of(grammar: str, tokens: LLTokenizer) -> str:
    """Why a grammar cannot be compiled; empty if it can."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    # Some grammars fail only where they are first used.
    matcher.compute_bitmask()
    return matcher.get_error()


def schema_of(grammar: str, error: str) -> tuple[str, dict[str, Any] | None]:
    """The rule of a Lark grammar that an error names, and the schema that the rule is."""
    if found := re.match(r"at (\d+)\((\d+)\): failed to compile JSON schema", error):
        line, column = map(int, found.groups())
        for part in json.loads(grammar)["grammars"]:
            lines = part.get("lark_grammar", "").split("\n")[line - 1 :]
            if lines and lines[0].startswith("%json", column - 1):
                text = "\n".join(lines)[column - 1 + len("%json") :]
                schema, _ = json.JSONDecoder().raw_decode(text.lstrip())
                return lines[0].partition(":")[0], schema
    return "", None


def blamed(schema: dict[str, Any], options: Any, tokens: LLTokenizer) -> list[str]:
    """The path of the innermost part of a schema that alone has the error of the whole, too."""

    def error_of_schema(schema: dict[str, Any]) -> str:
        return error_of(LLMatcher.grammar_from_json_schema(schema, overrides=options), tokens)

    error = error_of_schema(schema)
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    path: list[str] = []

    def inner(part: dict[str, Any]) -> dict[str, Any] | None:
        for steps, value in _parts(part):
            if error_of_schema({**shared, **value}) == error:
                path.extend(steps)
                return value
        return None

    part: dict[str, Any] | None = schema
    while part is not None:
        part = inner(part)
    return path


def _parts(part: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The objects in an object and in its lists and objects, with the steps to them."""
    for name, value in part.items():
        entries: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            yield [name], value
            entries = list(value.items())
        elif isinstance(value, list):
            entries = [(str(index), entry) for index, entry in enumerate(value)]
        for key, entry in entries:
            if isinstance(entry, dict):
                yield [name, key], entry


def main() -> None:
    asked = json.load(sys.stdin)
    # Imports have cost a busy machine more than an idle one.
    seconds = ceil(process_time()) + asked["seconds"]
    # Beyond the hard limit the signal would be SIGKILL.
    setrlimit(RLIMIT_CPU, (seconds, seconds + 1))
    tokens = LLTokenizer("byte")
    error = error_of(asked["grammar"], tokens)
    rule, schema = schema_of(asked["grammar"], error)
    print(json.dumps([error, rule]), flush=True)  # noqa: T201
    schema = asked.get("schema", schema)
    if error and isinstance(schema, dict):
        schema.pop("x-guidance", None)
        path = blamed(schema, asked["options"], tokens)
        print(json.dumps(path), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
