"""Compiles what answers must match before anything is sent, where llguidance is installed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from omlx_producer.client.formats import exact_schema
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import GenerationRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_FORM: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written as `json.dumps` writes it, so most tokens between values are forced."""

_OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")

_PLAINLY = {
    "NoExtension": "no text can match it",
    "Unsatisfiable schema: Regex is empty": "no text can match it",
    "oneOf constraints": "oneOf is taken only of schemas that exclude each other; give anyOf",
    "Expecting object schema": "it is no JSON object; give one",
}
"""How errors of llguidance begin, and what users read instead."""


def require_compilable(request: GenerationRequest) -> None:
    """Refuse a schema or a regular expression that no worker would compile.

    Without llguidance only the worker finds out. It compiles everything again, with limits.

    Raises:
        InvalidRequest: in the words of a worker.
    """
    constraint = request.constraint
    if constraint is None or find_spec("llguidance") is None:
        return
    from llguidance import LLMatcher

    try:
        if constraint.kind == "regex":
            kind, grammar = "regular expression", LLMatcher.grammar_from_regex(constraint.value)
        elif constraint.kind == "json_schema":
            kind, grammar = "schema", grammar_of_schema(constraint.value)
        else:
            return
        error = LLMatcher.validate_grammar(grammar)
    except ValueError as raised:
        error = str(raised)
    if error:
        got = f"the {kind} cannot be compiled ({plain_reason(error)})"
        raise InvalidRequest(request.constraint_field, got, "change it")


def grammar_of_schema(schema: str) -> str:
    """The grammar of a JSON schema in llguidance's own form.

    Raises:
        ValueError: if it cannot be compiled.
    """
    from llguidance import LLMatcher

    told = exact_schema(json.loads(schema))
    return LLMatcher.grammar_from_json_schema(told, overrides=JSON_FORM)


def plain_reason(error: str) -> str:
    """The part of llguidance's message that says why, on one line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    chosen = _OF_SCHEMA.sub("", chosen.removeprefix("error:").strip())
    if chosen.startswith("Unimplemented keys: "):
        names = " and ".join(re.findall('"(.+?)"', chosen))
        return f"{names}: not supported; leave it out"
    for start, plain in _PLAINLY.items():
        if chosen.startswith(start):
            return plain
    return chosen if len(chosen) <= 200 else f"{chosen[:200]}..."
