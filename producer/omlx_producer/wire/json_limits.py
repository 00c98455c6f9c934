"""How many values the JSON of a request may hold, as text and once it is read.

A few MiB of JSON become GiB of Python's objects, and validation makes an error of each wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.request_part import MAX_LEVELS, MAX_PROMPT_CHARACTERS

MAX_VALUES = 100_000
_MOST_NUMBERS = MAX_VALUES + MAX_PROMPT_CHARACTERS
# A member of an object, the costliest value, is a colon and two texts.
_MOST_MARKS = 4 * MAX_VALUES
# Other threads run between two blocks.
_BLOCK = 2**16
_MANY = "request", f"holds more than {MAX_VALUES} values beside its prompt", "shorten it"


def read_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text from outside.

    Raises:
        InvalidRequest: if it holds more values than a request may have. They are counted first.
        ValueError, RecursionError: as `json.loads`.
    """
    if len(text) > MAX_VALUES:
        _require_few_marks(text)
    return json.loads(text, parse_constant=parse_constant)


def _require_few_marks(text: str) -> None:
    commas = marks = quotes = 0
    rest = ""
    for start in range(0, len(text), _BLOCK):
        block = (rest + text[start : start + _BLOCK]).replace("\\\\", "")
        rest = "\\" if block.endswith("\\") else ""  # Half of an escape.
        parts = block.removesuffix(rest).replace('\\"', "").split('"')
        outside = "".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        commas += outside.count(",")
        marks += sum(map(outside.count, "[{:"))
        if marks + quotes // 2 > _MOST_MARKS:
            raise InvalidRequest(*_MANY)
        if commas > _MOST_NUMBERS:
            raise InvalidRequest("request", f"holds more than {_MOST_NUMBERS} values", "shorten it")


def require_few_values(request: Mapping[Any, Any]) -> None:
    """Refuse a request of very many values or levels. Its ``prompt`` is not counted.

    Raises:
        InvalidRequest: names the field that is nested too deeply.
    """
    left = MAX_VALUES - len(request)
    for name, field in request.items():
        waiting = [] if name == "prompt" else [(field, 1)]
        while waiting and left >= 0:
            value, level = waiting.pop()
            if not isinstance(value, dict | list):
                continue
            if level > MAX_LEVELS:
                raise InvalidRequest(
                    f"{name!s:.60}",
                    f"got more than {MAX_LEVELS} levels",
                    f"give at most {MAX_LEVELS}",
                )
            left -= len(value)
            if left >= 0:
                held = value.values() if isinstance(value, dict) else value
                waiting += [(item, level + 1) for item in held]
    if left < 0:
        raise InvalidRequest(*_MANY)
