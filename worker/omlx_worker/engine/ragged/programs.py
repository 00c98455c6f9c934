"""Compiled functions, for as long as they are of use.

MLX keeps every trace of a compiled function until the function itself is dropped: one graph of
the whole model a bucket of shapes, which takes a few hundred kilobytes a layer. A worker goes
through hundreds of layouts in a night. So there is a function for each, and those that were
used longest ago are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

MOST_TRACES = 64
"""Traces that are kept of all functions together; the one in use is kept whatever it has."""

Key = TypeVar("Key", bound=Hashable)
Function = TypeVar("Function")


class Programs(Generic[Key, Function]):
    """Functions by what they are compiled for.

    Attributes:
        traces: how many there were in all, those of dropped functions included.
    """

    def __init__(self) -> None:
        self.traces = 0
        # The one used longest ago first.
        self._kept: dict[Key, Function] = {}
        self._traces_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key, build: Callable[[Callable[[], None]], Function]) -> Function:
        """The function for a key, to be called at once.

        Args:
            build: makes it where there is none, of what it has to call whenever it is traced.
        """
        function = self._kept.pop(key, None)
        if function is None:
            self._traces_of[key] = 0
            function = build(partial(self._traced, key))
        self._kept[key] = function
        self._drop_old()
        return function

    def _traced(self, key: Key) -> None:
        self.traces += 1
        self._traces_of[key] += 1

    def _drop_old(self) -> None:
        while len(self._kept) > 1 and sum(self._traces_of.values()) > MOST_TRACES:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._traces_of[oldest]
