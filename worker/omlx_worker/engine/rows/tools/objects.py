"""Reads calls whose arguments are one JSON object, where they are written as in `Syntax`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omlx_producer.wire import FunctionDefinition
from omlx_worker.engine.rows.tools.syntax import Syntax

_JSON = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")


class ObjectReader:
    """Reads the calls of some functions. What their arguments spell is no syntax.

    Args:
        syntax: has no pairs.
    """

    def __init__(self, syntax: Syntax, functions: Sequence[FunctionDefinition]) -> None:
        names = "|".join(re.escape(function.name) for function in functions)
        before = re.escape(syntax.before.strip()).replace(re.escape("{name}"), f"({names})")
        # Kimi counts the calls of a text.
        before = re.sub(r":0(?!\d)", r":\\d+", before)
        start = f"(?:{re.escape(syntax.start)})?" if syntax.start else ""
        self._opening = re.compile(rf"\s*{start}\s*{before}\s*")
        self._after = syntax.after.strip()
        self._end = syntax.end

    def read(self, text: str, *, ended: bool = False) -> Iterator[dict[str, Any]]:
        """The calls in a text, in the form of mlx-lm's parsers.

        Args:
            ended: whether each is followed by the end marker.

        Raises:
            ValueError: after them, if the rest is written otherwise.
        """
        at = 0
        while at < len(text) or not at:
            opening = self._opening.match(text, at)
            if opening is None:
                raise ValueError("no function begins here")
            arguments, at = _JSON.raw_decode(text, opening.end())
            for expected in (self._after, self._end) if ended else (self._after,):
                at = _past_space(text, at)
                if not text.startswith(expected, at):
                    raise ValueError("something else follows")
                at += len(expected)
            at = _past_space(text, at)
            yield {"name": opening[1], "arguments": arguments}


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
