"""Reads calls that are written as in `Syntax`: the inverse of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omlx_worker.engine.rows.tools.parameters import Parameter
from omlx_worker.engine.rows.tools.syntax import Pairs, Syntax

_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}
_JSON = json.JSONDecoder(strict=False)
_TAG, _SPACE = re.compile(r"<\w+"), re.compile(r"\s*")

_WRAPPED = "<![CDATA["
"""Begins a text that MiniCPM wraps because it holds markup. mlx-lm unwraps it."""


class ExactReader:
    """Reads the calls of some functions. What an argument spells is no syntax.

    An object may have white space around it. Pairs are read as they are written, numbers and white
    space included.

    Args:
        syntax: not bare. Its pairs, if it has any, are raw, with nothing between them, and end
            with a tag.
        functions: their parameters, by their names.
    """

    def __init__(self, syntax: Syntax, functions: Mapping[str, Sequence[Parameter]]) -> None:
        self._pairs = syntax.pairs
        self._end, self._after = syntax.end, syntax.after.strip()
        before = syntax.before.lstrip() if syntax.pairs else syntax.before.strip()
        names = sorted(functions, key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        opening = re.escape(before).replace(re.escape("{name}"), f"({either})")
        if syntax.pairs is None:
            # Kimi counts the calls of a text.
            opening = re.sub(r":0(?!\d)", r":\\d+", opening) + r"\s*+"
        gap = rf"\s*+(?:{re.escape(syntax.start)}\s*+)?"
        self._gap, self._opening = re.compile(gap), re.compile(gap + opening)
        openings = [before.replace("{name}", name).rstrip() for name in names]
        self._following = (*openings, syntax.start, syntax.end)
        self._parameters = {
            name: {parameter.key: parameter for parameter in parameters}
            for name, parameters in functions.items()
        }

    def read(self, text: str, *, ended: bool = False) -> Iterator[dict[str, Any]]:
        """The calls in a text, in the form of mlx-lm's parsers.

        Args:
            ended: whether each is followed by the end marker.

        Raises:
            ValueError: after them, if the rest is written otherwise.
        """
        at, text = 0, text.rstrip()
        while at < len(text) or not at:
            opening = self._opening.match(text, at)
            if opening is None or (at and self._pairs and not (self._after or ended)):
                raise ValueError("no function begins here")
            name, at = opening[1], opening.end()
            if self._pairs is None:
                arguments, at = _JSON.raw_decode(text, at)
            else:
                arguments, at = self._arguments(text, at, self._pairs, self._parameters[name])
            at = _past(text, _past_space(text, at), self._after)
            at = _past(text, _past_space(text, at), self._end if ended else "")
            if self._pairs and not self._goes_on(text, at):
                raise ValueError("the call may end elsewhere")
            yield {"name": name, "arguments": arguments}

    def _goes_on(self, text: str, at: int) -> bool:
        """Whether a text ends at a place after a call, or what is there may begin another."""
        found = self._gap.match(text, at)
        at = found.end() if found else at
        rest = text[at : at + max(map(len, self._following))]
        return any(rest.startswith(each) or each.startswith(rest) for each in self._following)

    def functions(self, text: str) -> Iterator[tuple[str, int]]:
        """The functions in a text that is written otherwise, and how many pairs each has.

        Raises:
            ValueError: if there is more than pairs in one, so that a value may end elsewhere.
        """
        assert self._pairs is not None
        # However a call is written, each of its pairs begins and ends with these.
        begin, close = _TAG.findall(self._pairs.before)[0], self._pairs.after.strip()
        after = self._after or self._end
        count = 0
        *pairs, rest = text.split(close)
        at = end = 0
        for pair in pairs:
            gap, begun, _ = pair.partition(begin)
            if not begun:
                raise ValueError("no pair begins here")
            if count and gap.strip():
                past = _past(text, end + len(gap) - len(gap.lstrip()), after)
                yield text[at:past], count
                at, count = past, 0
            end, count = end + len(pair) + len(close), count + 1
        if begin in rest or (count and rest.strip() not in ("", after)):
            raise ValueError("the last pair may end elsewhere")
        yield text[at:], count

    @staticmethod
    def _arguments(
        text: str, at: int, pairs: Pairs, parameters: dict[str, Parameter]
    ) -> tuple[dict[str, Any], int]:
        """The arguments from a place on, and the place after them."""
        head, tail = pairs.before.split("{key}")
        arguments = {}
        while text.startswith(head, at):
            begun = at + len(head)
            end = text.index(tail, begun)
            parameter = parameters.get(text[begun:end])
            if parameter is None or parameter.type is None:
                raise ValueError("a value may have several types")
            if parameter.key in arguments:
                raise ValueError("a value is given twice")
            read = _text if parameter.type == "string" else _json
            arguments[parameter.key], at = read(text, end + len(tail), parameter, pairs.after)
        return arguments, at


def _text(text: str, at: int, parameter: Parameter, after: str) -> tuple[str | None, int]:
    end = text.index(after, at)
    value = text[at:end]
    if after.strip() in value or value.startswith(_WRAPPED):
        raise ValueError("the text may end elsewhere")
    null = parameter.nullable and value == "null"
    return None if null else value, end + len(after)


def _json(text: str, at: int, parameter: Parameter, after: str) -> tuple[Any, int]:
    value, end = _JSON.raw_decode(text, at)
    if value is not None and not isinstance(value, _TYPES[str(parameter.type)]):
        raise ValueError("the value is of another type")
    return value, _past(text, end, after)


def _past(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError("something else follows")
    return at + len(expected)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
