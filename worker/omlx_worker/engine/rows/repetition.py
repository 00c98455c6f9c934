"""Detects texts that repeat themselves, token by token. This module imports no MLX."""

from __future__ import annotations

import math
from collections import defaultdict, deque

from omlx_producer.wire import RepetitionDetection


class Repetition:
    """Watches the tokens of one row.

    A pattern of ``n`` tokens repeats at the end if each of the last tokens is the one ``n``
    positions before it. So for every distance it counts for how many tokens that has been so. Only
    distances at which the newest token occurs are looked at: of usual texts a few.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        self._longest = detection.max_pattern_size
        self._needed = [
            detection.needed(size) - size if size >= detection.min_pattern_size else math.inf
            for size in range(self._longest + 1)
        ]
        self._tokens = 0
        self._positions: defaultdict[int, deque[int]] = defaultdict(deque)
        self._runs: dict[int, int] = {}

    def feed(self, token: int) -> bool:
        """Take the next token; returns whether a pattern has now repeated often enough."""
        at, positions, before = self._tokens, self._positions[token], self._runs
        self._tokens += 1
        while positions and at - positions[0] > self._longest:
            positions.popleft()
        self._runs, enough = {}, False
        for position in positions:
            size = at - position
            run = self._runs[size] = before.get(size, 0) + 1
            enough = enough or run >= self._needed[size]
        positions.append(at)
        return enough
