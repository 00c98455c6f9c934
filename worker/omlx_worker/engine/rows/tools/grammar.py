"""Grammars of llguidance that hold a model to calls in its family's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from omlx_producer.client.compiling import JSON_FORM
from omlx_producer.client.formats import exact_schema
from omlx_producer.wire import (
    Calling,
    Constraint,
    FunctionDefinition,
    GenerationRequest,
    InvalidRequest,
)
from omlx_worker.engine.rows.lark import Spelling, literally, quoted, text_without
from omlx_worker.engine.rows.tools.parameters import (
    NotWritable,
    Parameter,
    parameters_of,
    require_pairs,
)
from omlx_worker.engine.rows.tools.syntax import Pairs, Syntax

_KEY = re.compile(r"[A-Za-z0-9_.$-]+")


class CallGrammar:
    """Writes the grammar of what may be called, in Lark's notation.

    Args:
        spelling: of the model's tokens.
        header: what an answer that is no call begins with, as a rule has it; "" for nothing.

    Raises:
        NotWritable: if the syntax cannot express a function's parameters.
    """

    def __init__(
        self,
        calling: Calling,
        syntax: Syntax,
        spelling: Spelling,
        header: str = "",
    ) -> None:
        if not syntax.before:
            raise NotWritable("no grammar of their syntax is known")
        self._calling = calling
        self._header = header
        self._syntax = syntax
        self._spelling = spelling
        self._rules: dict[str, str] = {}
        names = [self._function(index, each) for index, each in enumerate(calling.functions)]
        self._rules["body"] = " | ".join(names)
        # A header of channels begins with what may be the channel.
        start = "" if syntax.has_recipient else self._spelling.literal(syntax.start)
        self._rules["call"] = self._joined(start, self._rest_of_call)

    def required(self) -> str:
        """Calls, and nothing else."""
        return self._written(self._calls)

    def beside(self, answer: Constraint) -> str:
        """Calls, or an answer in JSON.

        Raises:
            NotWritable: if a call cannot be told from such an answer.
        """
        if self._syntax.bare:
            raise NotWritable("they look like an answer in JSON")
        schema = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.value)
        self._rules["answer"] = _json(schema)
        return self._written(f"{self._joined(self._header, 'answer')} | {self._calls}")

    def free(self) -> str:
        """Any text, with calls in it."""
        if self._syntax.bare:
            self._rules["REST"] = r"/(\s*[^{\s](?s:.*))?/"
            return self._written("REST | body")
        if self._syntax.has_recipient:
            self._rules["REST"] = "/(?s:.*)/"
            return self._written(f"{self._joined(self._header, 'REST')} | {self._calls}")
        start = self._syntax.start
        self._rules["REST"] = rest = text_without(start)
        call = self._joined(self._up_to(start, rest, "before"), self._rest_of_call)
        return self._written(f"({call})* REST" if self._several else f"REST | {call}")

    @property
    def _several(self) -> bool:
        return self._calling.parallel and self._syntax.repeats

    @property
    def _calls(self) -> str:
        return "call" if self._syntax.section else self._repeated("call", self._syntax.between)

    @property
    def _rest_of_call(self) -> str:
        before, between, after = self._syntax.section or ("", "", "")
        return self._joined(
            self._spelling.literal(before),
            self._repeated("body", between) if self._syntax.section else "body",
            self._spelling.literal(after + self._syntax.end),
        )

    def _repeated(self, rule: str, between: str) -> str:
        if not self._several:
            return rule
        return f"{rule} ({self._joined(self._spelling.literal(between), rule)})*"

    def _up_to(self, marker: str, text: str, rule: str) -> str:
        """A text and the marker after it.

        Args:
            text: as a regular expression.
            rule: a name for it.
        """
        first = self._spelling.first(marker)
        if first is None:
            self._rules[f"{rule}[suffix={quoted(marker)}]"] = text
            return rule
        ending = f" & /(?s:.*){literally(marker[:first])}/" if first else ""
        self._rules[rule.upper()] = text + ending
        return f"{rule.upper()} {self._spelling.literal(marker[first:])}"

    def _written(self, start: str) -> str:
        rules = {"start": start, **self._rules}
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _function(self, index: int, function: FunctionDefinition) -> str:
        name, schema = f"f{index}", function.schema_of_arguments
        pairs = self._syntax.pairs
        if pairs is None:
            self._rules[f"{name}_arguments"] = _json(schema)
            arguments = f"{name}_arguments"
        else:
            if pairs.identifiers and not function.name.isidentifier():
                raise NotWritable(f"the name {function.name!r} is no identifier")
            parameters = parameters_of(schema)
            require_pairs(schema, parameters)
            named = [
                (self._pair(f"{name}_{index}", each, pairs), each.required)
                for index, each in enumerate(parameters)
            ]
            arguments = self._sequence(named, self._spelling.literal(pairs.between))
        self._rules[name] = self._joined(
            self._before(function.name),
            arguments,
            self._spelling.literal(self._syntax.after),
        )
        return name

    def _before(self, name: str) -> str:
        """What comes before the arguments of a function."""
        if not self._syntax.has_recipient:
            return self._spelling.literal(self._syntax.before.replace("{name}", name))
        channel, kind, message = map(
            self._spelling.literal, ("<|channel|>", "<|constrain|>", "<|message|>")
        )
        self._rules["channel"] = f'{channel} ("commentary" | "analysis")'
        self._rules["kind"] = f'(" "? {kind} "json" | " json" | " code")?'
        to = quoted(f" to=functions.{name}")
        return f"(channel {to} kind | {to} channel kind) {message}"

    def _sequence(self, named: Sequence[tuple[str, bool]], between: str) -> str:
        """Pairs in their order, of which optional ones may be left out.

        With something between pairs, the required ones come first.
        """
        if not between:
            return " ".join(name if needed else f"{name}?" for name, needed in named)
        required = [name for name, needed in named if needed]
        optional = [name for name, needed in named if not needed]
        following = [f"({between} {name})?" for name in optional]
        if required:
            return " ".join([f" {between} ".join(required), *following])
        ways = [" ".join([name, *following[at + 1 :]]) for at, name in enumerate(optional)]
        return f"({' | '.join(ways)})?" if ways else ""

    def _pair(self, rule: str, parameter: Parameter, pairs: Pairs) -> str:
        if _KEY.fullmatch(parameter.key) is None or (
            pairs.identifiers and not parameter.key.isidentifier()
        ):
            raise NotWritable(f"the name {parameter.key!r:.60} has other characters than letters")
        after = self._spelling.literal(pairs.after)
        ways = []
        if pairs.raw and parameter.type == "string":
            ways.append((True, self._text(parameter, pairs)))
            if pairs.told and parameter.nullable:
                ways.append((False, self._joined('"null"', after)))
        elif pairs.raw and not pairs.told and parameter.type is None:
            raise NotWritable(f"the parameter {parameter.key!r} may have several types")
        else:
            self._rules[f"{rule}_value"] = _json(parameter.schema)
            ways.append((False, self._joined(f"{rule}_value", after)))
        before = pairs.before.replace("{key}", parameter.key)
        self._rules[rule] = " | ".join(
            f"{self._spelling.literal(before.replace('{string}', json.dumps(string)))} {value}"
            for string, value in ways
        )
        return rule

    def _text(self, parameter: Parameter, pairs: Pairs) -> str:
        """A text as it is, and what follows it."""
        texts = parameter.texts
        if texts is None:
            text = text_without(pairs.after.strip(), self._syntax.end)
            return self._up_to(pairs.after, text, "text")
        texts += ["null"] if parameter.nullable and not pairs.told else []
        after = self._spelling.literal(pairs.after)
        return self._joined(f"({' | '.join(map(quoted, texts))})", after)

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(filter(None, parts))


def grammar_of_calls(
    model: str,
    calling: Calling,
    syntax: Syntax,
    spelling: Spelling,
    header: str,
    answer: Constraint | None,
) -> str:
    """The grammar of an answer that may have calls.

    Args:
        model: its name, for errors.
        syntax: how it writes calls.
        answer: what an answer without calls must match.

    Raises:
        InvalidRequest: if the calls cannot be held to their schemas.
    """
    try:
        grammar = CallGrammar(calling, syntax, spelling, header)
        if calling.required:
            return grammar.required()
        return grammar.free() if answer is None else grammar.beside(answer)
    except NotWritable as reason:
        if calling.required:
            field, remedy = "tool_choice", 'give "auto"'
        elif answer is None:
            field, remedy = "tools", "leave strict out"
        else:
            field, remedy = "response_format", "leave it or the tools out"
        raise InvalidRequest(
            field, f"calls by {model} cannot be held to their schemas, because {reason}", remedy
        ) from None


def field_of(rule: str, request: GenerationRequest) -> str:
    """The field of a request with tools whose schema is in a rule; "" for any other rule."""
    if rule == "answer":
        return "response_format"
    found = re.fullmatch(r"f(\d+)_(?:arguments|(\d+)_value)", rule)
    if found is None or request.calling is None:
        return ""
    function = request.calling.functions[int(found[1])]
    names = [tool.function.name for tool in request.tools or ()]
    field = f"tools[{names.index(function.name)}].function.parameters"
    if found[2] is None:
        return field
    return f"{field}.properties.{parameters_of(function.schema_of_arguments)[int(found[2])].key}"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**exact_schema(schema), 'x-guidance': JSON_FORM})}"
