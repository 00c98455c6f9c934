"""Reads calls of tools from a model's text, exactly or else with mlx-lm's parsers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import FunctionCall, FunctionDefinition
from omlx_worker.engine.rows.tools.exact import ExactReader
from omlx_worker.engine.rows.tools.parameters import Parameter, parameters_of, simplified
from omlx_worker.engine.rows.tools.syntax import syntax_of

log = logging.getLogger(__name__)

# What the parsers raise at a text that they do not expect.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,  # raised by Python's own parser at deep nesting
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
Parser = Callable[[str, list[dict[str, Any]]], Any]

_NUMBERS = ("integer", "number")
_ROUNDING = ("qwen3_coder", "minimax_m2", "minicpm5")
"""Families whose parsers make floats of numbers."""

MOST_CHARACTERS = 100_000
"""Of a call that mlx-lm's parsers get; longer ones stay unread."""

_SLOW = {"gemma4": ("call:", 5_000_000), "glm47": ("<arg_key>", 150_000_000)}
"""Where parsers begin to search up to the end of a text, and the characters that take a second."""


class CallReader:
    """Reads the calls of some functions."""

    def __init__(
        self, tokenizer: TokenizerWrapper, functions: Sequence[FunctionDefinition]
    ) -> None:
        syntax = syntax_of(tokenizer)
        self._family = syntax.parser
        self._parameters = {
            function.name: parameters_of(function.schema_of_arguments) for function in functions
        }
        self._exact = ExactReader(syntax, self._parameters) if syntax.is_exact else None
        self._in_pairs = syntax.pairs is not None
        self._ends = bool(syntax.after.strip())
        self._end = syntax.end
        # Where a call has no end marker, the next one's start ends it.
        self._next = syntax.start if syntax.repeats and not syntax.end else ""
        self._parser: Parser | None = None
        if syntax.parser:
            module = import_module(f"mlx_lm.tool_parsers.{syntax.parser}")
            self._parser = module.parse_tool_call
        # The parser takes these for texts, so that `_value` finds them as they were written.
        self._texts = _NUMBERS if self._family in _ROUNDING else ()
        self._tools = [
            {
                "type": "function",
                "function": {"name": name, "parameters": simplified(parameters, self._texts)},
            }
            for name, parameters in self._parameters.items()
        ]

    def read(self, text: str) -> list[FunctionCall]:
        """The calls that can be read in the text between the markers of a call."""
        calls = self._read(text)
        if not calls and self._next and self._next in text:
            calls = [call for part in text.split(self._next) for call in self._read(part)]
        return calls

    def read_cut(self, text: str) -> list[FunctionCall]:
        """The calls that have their own ends in a text that was cut after the marker of a call."""
        return self._exactly(text)[0] if self._ends else []

    def read_all(self, text: str) -> list[FunctionCall]:
        """The calls with their end markers in the rest of a text after the first one's start."""
        calls, complete = self._exactly(text, ended=True)
        if complete:
            return calls
        # MiniCPM wraps some texts, which its parser unwraps.
        before, end, _ = text.rpartition(self._end)
        return max(calls, self._read(before + end), key=len)

    @property
    def is_exact(self) -> bool:
        """Whether all that the grammar takes is read as it is written."""
        return self._exact is not None

    def _exactly(self, text: str, *, ended: bool = False) -> tuple[list[FunctionCall], bool]:
        """The calls that are written exactly, and whether all of the text is."""
        found: list[dict[str, Any]] = []
        complete = False
        if self._exact is not None:
            with _skipping():
                found.extend(self._exact.read(text, ended=ended))
                complete = True
        return self._called(found), complete

    def _read(self, text: str) -> list[FunctionCall]:
        found: list[dict[str, Any]] = []
        with _skipping():
            found = self._parsed(text)
        return self._called(found)

    def _called(self, found: Sequence[dict[str, Any]]) -> list[FunctionCall]:
        calls: list[FunctionCall] = []
        for call in found:
            with _skipping():
                calls.append(self._call(call))
        return calls

    def _parsed(self, text: str) -> list[dict[str, Any]]:
        if self._exact is not None:
            with suppress(ValueError):
                return list(self._exact.read(text))
        if self._parser is None:
            raise ValueError("it is written otherwise")
        if self._takes_long(text):
            raise ValueError("it takes too long to read")
        if self._exact and self._in_pairs:
            functions = self._exact.functions(text)
            return [self._paired(self._parser, *each) for each in functions]
        found = self._parser(text, self._tools)
        return found if isinstance(found, list) else [found]

    def _paired(self, parser: Parser, function: str, pairs: int) -> dict[str, Any]:
        """The call of a function that is written otherwise. Each of its pairs is an argument."""
        call: dict[str, Any] = parser(function, self._tools)
        if pairs and len(call["arguments"]) != pairs:
            raise ValueError("a value may end elsewhere")
        return call

    def _takes_long(self, text: str) -> bool:
        begin, most = _SLOW.get(self._family, ("", 0))
        searched = text.count(begin) * len(text) if begin else 0
        return len(text) > MOST_CHARACTERS or searched > most

    def _call(self, call: dict[str, Any]) -> FunctionCall:
        name, arguments = call["name"], call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
        for parameter in self._parameters[name]:
            if parameter.key in arguments:
                arguments[parameter.key] = self._value(arguments[parameter.key], parameter)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair is no text that can be sent. Its escape in JSON is the same here.
        sendable = text.encode(errors="backslashreplace").decode()
        return FunctionCall(name=name, arguments=sendable)

    def _value(self, value: Any, parameter: Parameter) -> Any:
        if value is None and parameter.type == "string" and not parameter.nullable:
            return "null"  # The parsers take the text null of a pair for a null.
        if isinstance(value, str) and parameter.type in self._texts:
            return json.loads(value)
        return value


@contextmanager
def _skipping() -> Iterator[None]:
    """Tell that a call cannot be read, and go on."""
    try:
        yield
    except _UNREADABLE as error:
        # Not the error itself: it may quote the text.
        log.info("a call could not be read (%s)", type(error).__name__)
