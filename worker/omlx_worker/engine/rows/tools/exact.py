"""Reads calls that are written as in `Syntax`: the inverse of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
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

    An object may have white space around it. A call may be an object as a whole, in a list or not,
    whatever else is in it. Pairs are read as they are written, numbers and white space included.

    Args:
        syntax: its pairs, if it has any, are raw, with nothing between them, and end with a tag.
        functions: their parameters, by their names.
    """

    def __init__(self, syntax: Syntax, functions: Mapping[str, Sequence[Parameter]]) -> None:
        self._pairs = syntax.pairs
        self._objects = syntax.before.lstrip().startswith("{")
        self._end, self._after = syntax.end, syntax.after.strip()
        before = syntax.before.lstrip() if syntax.pairs else syntax.before.strip()
        names = sorted(functions, key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        if syntax.pairs is None:
            either += r"|[\w.-]+"  # a call of another function takes no call beside it along
        opening = syntax.header or re.escape(before).replace(re.escape("{name}"), "{name}")
        opening = opening.replace("{name}", f"({either})") + r"\s*+" * (syntax.pairs is None)
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
            begun = self._past_gap(text, at)
            may_be_object = self._objects or (self._pairs is None and not at)
            if may_be_object and text.startswith(("{", "["), begun):
                at = yield from self._named(text, begun, self._end if ended else "")
                continue
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

    @staticmethod
    def _named(text: str, at: int, end: str) -> Generator[dict[str, Any], None, int]:
        """The calls that are objects from a place on, one or a list. Returns the place after."""
        listed = text.startswith("[", at)
        at += listed
        while True:
            call, at = _JSON.raw_decode(text, _past_space(text, at))
            at = _past_space(text, at)
            last = not listed or text.startswith("]", at)
            if last:
                at = _past(text, _past_space(text, at + listed), end)
            yield {
                "name": call.get("name", call.get("tool_name")),
                "arguments": call.get("arguments", call.get("parameters", {})),
            }
            if last:
                return at
            at = _past(text, at, ",")

    def _past_gap(self, text: str, at: int) -> int:
        found = self._gap.match(text, at)
        return found.end() if found else at

    def _goes_on(self, text: str, at: int) -> bool:
        """Whether a text ends at a place after a call, or what is there may begin another."""
        at = self._past_gap(text, at)
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
        tail, told, close = tail.partition("{string}")
        arguments = {}
        while text.startswith(head, at):
            begun = at + len(head)
            end = text.index(tail, begun)
            key, at = text[begun:end], end + len(tail)
            if key in arguments:
                raise ValueError("a value is given twice")
            parameter = parameters.get(key)
            if told:
                is_text = text.startswith("true", at)
                at = _past(text, at, ("true" if is_text else "false") + close)
            elif parameter is None or parameter.type is None:
                raise ValueError("a value may have several types")
            else:
                is_text = parameter.type == "string"
            arguments[key], at = (_text if is_text else _json)(text, at, pairs.after)
            if parameter is not None and not told:
                arguments[key] = _typed(arguments[key], parameter)
        return arguments, at


def _text(text: str, at: int, after: str) -> tuple[str, int]:
    end = text.index(after, at)
    value = text[at:end]
    if after.strip() in value:
        raise ValueError("the text may end elsewhere")
    return value, end + len(after)


def _json(text: str, at: int, after: str) -> tuple[Any, int]:
    value, end = _JSON.raw_decode(text, at)
    return value, _past(text, end, after)


def _typed(value: Any, parameter: Parameter) -> Any:
    """A value of a type that only the parameter tells."""
    if parameter.type == "string":
        if value.startswith(_WRAPPED):
            raise ValueError("the text may be wrapped")
        return None if parameter.nullable and value == "null" else value
    if value is not None and not isinstance(value, _TYPES[str(parameter.type)]):
        raise ValueError("the value is of another type")
    return value


def _past(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError("something else follows")
    return at + len(expected)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
