"""A bounded cache of compiled functions.

MLX keeps every trace of a compiled function until the function itself is dropped: one graph of
the whole model per bucket of shapes, a few hundred kilobytes a layer. A worker meets hundreds of
layouts in a night. So each layout has a function of its own, and the least recently used go.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

MOST_TRACES = 64
"""Traces kept of all functions together; the function in use is always kept."""

Key = TypeVar("Key", bound=Hashable)
Function = TypeVar("Function")


class Programs(Generic[Key, Function]):
    """Functions by what they are compiled for.

    Attributes:
        traces: made so far, those of dropped functions included.
    """

    def __init__(self) -> None:
        self.traces = 0
        # Least recently used first.
        self._kept: dict[Key, Function] = {}
        self._traces_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key, build: Callable[[Callable[[], None]], Function]) -> Function:
        """The function for a key; the caller calls it at once.

        Args:
            build: makes it if missing. Takes a callback that the function calls on every trace.
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
