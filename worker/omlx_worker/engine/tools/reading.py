"""Reads calls of tools from a model's text, with mlx-lm's parsers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.protocol import FunctionCall, FunctionDefinition
from omlx_worker.engine.tools.parameters import parameters_of, simplified

log = logging.getLogger(__name__)

# What the parsers raise at a text that they do not expect.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
Parser = Callable[[str, list[dict[str, Any]]], Any]


class CallReader:
    """Reads the calls of some functions, with mlx-lm's parser for the model if it has one."""

    def __init__(
        self, tokenizer: TokenizerWrapper, functions: Sequence[FunctionDefinition]
    ) -> None:
        self._parser: Parser = tokenizer.tool_parser or _parse_bare
        self._functions = {function.name: function for function in functions}
        self._tools = [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "parameters": simplified(function.schema_of_arguments),
                },
            }
            for function in functions
        ]

    def read(self, text: str) -> list[FunctionCall]:
        """The calls in the text between the markers of a call; none if it cannot be read."""
        try:
            found = self._parser(text, self._tools)
            calls = found if isinstance(found, list) else [found]
            return [self._call(call) for call in calls]
        except _UNREADABLE as error:
            # Not the error itself: it may quote the text.
            log.info("a call could not be read (%s)", type(error).__name__)
            return []

    def _call(self, call: dict[str, Any]) -> FunctionCall:
        function, arguments = self._functions[call["name"]], call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
        for parameter in parameters_of(function.schema_of_arguments):
            # The parsers take the text null of a pair for a null.
            null = arguments.get(parameter.key, "") is None
            if null and parameter.type == "string" and not parameter.nullable:
                arguments[parameter.key] = "null"
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair is no text that can be sent. Its escape in JSON is the same here.
        sendable = text.encode(errors="backslashreplace").decode()
        return FunctionCall(name=function.name, arguments=sendable)


def _parse_bare(text: str, _: list[dict[str, Any]]) -> dict[str, Any]:
    """A call that is a JSON object with a name and, as Llama 3 calls them, parameters."""
    call = json.loads(text)
    return {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))}
