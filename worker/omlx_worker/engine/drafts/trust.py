"""Learns how long a match must be for its drafts to replace the model's own."""

from __future__ import annotations

from omlx_worker.engine.drafts.lookup import LONGEST, SHORTEST

MEMORY = 0.998  # of a rate after one more outcome: 500 outcomes
PRIOR, RATE = 8.0, 0.8  # outcomes that the first guess counts for, and the guess


class _Rate:
    def __init__(self) -> None:
        self._tries, self._hits = PRIOR, PRIOR * RATE

    def add(self, *, hit: bool) -> None:
        self._tries = self._tries * MEMORY + 1
        self._hits = self._hits * MEMORY + hit

    @property
    def value(self) -> float:
        return self._hits / self._tries


class Trust:
    """Rates of right first drafts: of matches of each length, and of the model's own.

    A match's first token is compared with the text whether it was drafted or not.

    Args:
        own: whether the model drafts itself. If not, every match is taken: the depth policy judges
            whether drafts pay.
    """

    def __init__(self, *, own: bool) -> None:
        self._own = _Rate() if own else None
        self._matches = {length: _Rate() for length in range(SHORTEST, LONGEST + 1)}

    def match(self, length: int, *, right: bool) -> None:
        self._matches[length].add(hit=right)

    def own(self, *, right: bool) -> None:
        if self._own:
            self._own.add(hit=right)

    @property
    def shortest(self) -> int:
        """The shortest match to take. It and all longer ones are right as often as own drafts."""
        if self._own is None:
            return SHORTEST
        shortest = LONGEST + 1
        while shortest > SHORTEST and self._matches[shortest - 1].value >= self._own.value:
            shortest -= 1
        return shortest
