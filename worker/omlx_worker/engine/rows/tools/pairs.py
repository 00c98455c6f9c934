"""Reads calls whose arguments are pairs of texts, where they are written exactly as in `Syntax`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omlx_producer.wire import FunctionDefinition
from omlx_worker.engine.rows.tools.parameters import Parameter, parameters_of
from omlx_worker.engine.rows.tools.syntax import Pairs, Syntax

_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}
_JSON = json.JSONDecoder(strict=False)
_TAG = re.compile(r"<\w+")

_WRAPPED = "<![CDATA["
"""Begins a text that MiniCPM wraps because it holds markup. mlx-lm unwraps it."""


class PairReader:
    """Reads the calls of some functions. Numbers and white space stay as they are.

    Args:
        syntax: has pairs that are raw, with nothing between them, and end with a tag.
    """

    def __init__(self, syntax: Syntax, functions: Sequence[FunctionDefinition]) -> None:
        assert syntax.pairs is not None
        self._pairs: Pairs = syntax.pairs
        before, self._after = syntax.before.lstrip(), syntax.after.rstrip()
        self._start, self._end = syntax.start, syntax.end
        # However a call is written, each of its pairs begins and ends with these.
        self._begin, self._close = _TAG.findall(self._pairs.before)[0], self._pairs.after.strip()
        self._openings = {
            before.replace("{name}", function.name): function.name for function in functions
        }
        self._parameters = {
            function.name: {
                parameter.key: parameter
                for parameter in parameters_of(function.schema_of_arguments)
            }
            for function in functions
        }

    def read(self, text: str, *, ended: bool = False) -> Iterator[dict[str, Any]]:
        """The calls in a text, in the form of mlx-lm's parsers.

        Args:
            ended: whether each is followed by the end marker.

        Raises:
            ValueError: after them, if the rest is written otherwise.
        """
        found, text = 0, text.strip()
        while text or not found:
            openings = [opening for opening in self._openings if text.startswith(opening)]
            if not openings or (found and not (self._after or ended)):
                raise ValueError("no function begins here")
            opening = max(openings, key=len)
            name = self._openings[opening]
            arguments, at = self._arguments(text, len(opening), self._parameters[name])
            text, found = text[_past(text, at, self._after) :].lstrip(), found + 1
            if ended:
                text = text[_past(text, 0, self._end) :].lstrip().removeprefix(self._start).lstrip()
            following = (*map(str.rstrip, self._openings), self._start, self._end)
            if not any(text.startswith(each) or each.startswith(text) for each in following):
                raise ValueError("the call may end elsewhere")
            yield {"name": name, "arguments": arguments}

    def functions(self, text: str) -> Iterator[tuple[str, int]]:
        """The functions in a text that is written otherwise, and how many pairs each has.

        Raises:
            ValueError: if there is more than pairs in one, so that a value may end elsewhere.
        """
        after = self._after or self._end
        count = 0
        *pairs, rest = text.split(self._close)
        at = end = 0
        for pair in pairs:
            gap, begin, _ = pair.partition(self._begin)
            if not begin:
                raise ValueError("no pair begins here")
            if count and gap.strip():
                past = _past(text, end + len(gap) - len(gap.lstrip()), after)
                yield text[at:past], count
                at, count = past, 0
            end, count = end + len(pair) + len(self._close), count + 1
        if self._begin in rest or (count and rest.strip() not in ("", after)):
            raise ValueError("the last pair may end elsewhere")
        yield text[at:], count

    def _arguments(
        self, text: str, at: int, parameters: dict[str, Parameter]
    ) -> tuple[dict[str, Any], int]:
        """The arguments from a place on, and the place after them."""
        head, tail = self._pairs.before.split("{key}")
        arguments = {}
        while text.startswith(head, at):
            begun = at + len(head)
            end = text.index(tail, begun)
            parameter = parameters.get(text[begun:end])
            if parameter is None or parameter.type is None:
                raise ValueError("a value may have several types")
            if parameter.key in arguments:
                raise ValueError("a value is given twice")
            read = self._text if parameter.type == "string" else self._json
            arguments[parameter.key], at = read(text, end + len(tail), parameter)
        return arguments, at

    def _text(self, text: str, at: int, parameter: Parameter) -> tuple[str | None, int]:
        after = self._pairs.after
        end = text.index(after, at)
        value = text[at:end]
        if self._close in value or value.startswith(_WRAPPED):
            raise ValueError("the text may end elsewhere")
        null = parameter.nullable and value == "null"
        return None if null else value, end + len(after)

    def _json(self, text: str, at: int, parameter: Parameter) -> tuple[Any, int]:
        value, end = _JSON.raw_decode(text, at)
        if value is not None and not isinstance(value, _TYPES[str(parameter.type)]):
            raise ValueError("the value is of another type")
        return value, _past(text, end, self._pairs.after)


def _past(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError("something else follows")
    return at + len(expected)
