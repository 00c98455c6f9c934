"""Compiles a grammar in a process of its own, over bytes in place of a model's tokens.

llguidance has no limit on time, and a hostile grammar overflows its stack, which ends the process
(seen with 1.9.1: chains of 5,000 references). So the worker runs this file before it compiles a
grammar itself. The system ends it with SIGXCPU when its CPU time is up.

It reads a JSON object: ``grammar`` in llguidance's own form, ``seconds`` of CPU time, and of a JSON
schema ``schema`` and ``options``. It prints lines of JSON: why the grammar cannot be compiled,
empty if it can; then, of a schema that cannot, the path of the innermost part that is to blame.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from resource import RLIMIT_CPU, setrlimit
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def error_of(grammar: str, tokens: LLTokenizer) -> str:
    """Why a grammar cannot be compiled; empty if it can."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    # Some grammars fail only where they are first used.
    matcher.compute_bitmask()
    return matcher.get_error()


def blamed(schema: dict[str, Any], options: Any, error: str, tokens: LLTokenizer) -> list[str]:
    """The path of the innermost part of a schema that alone has this error, too."""
    shared: dict[str, Any] = {
        name: schema[name] for name in ("$defs", "definitions") if name in schema
    }
    path: list[str] = []

    def inner(part: dict[str, Any]) -> dict[str, Any] | None:
        for steps, value in _parts(part):
            alone = LLMatcher.grammar_from_json_schema({**shared, **value}, overrides=options)
            if error_of(alone, tokens) == error:
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
        held: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            yield [name], value
            held = list(value.items())
        elif isinstance(value, list):
            held = [(str(index), entry) for index, entry in enumerate(value)]
        for key, entry in held:
            if isinstance(entry, dict):
                yield [name, key], entry


def main() -> None:
    asked = json.load(sys.stdin)
    # Beyond the hard limit the signal would be SIGKILL.
    setrlimit(RLIMIT_CPU, (asked["seconds"], asked["seconds"] + 1))
    tokens = LLTokenizer("byte")
    error = error_of(asked["grammar"], tokens)
    print(json.dumps(error), flush=True)  # noqa: T201
    if error and "schema" in asked:
        path = blamed(asked["schema"], asked["options"], error, tokens)
        print(json.dumps(path), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
