"""Bounds the tokens that the decode thread has produced and Redis has not taken.

While Redis is away, decoding goes on and its tokens wait in memory. At the bound it pauses: the
backlog must not take the memory that the model needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.engine.rows.emission import Emission

# About 25 MB at 200 bytes per token; several minutes of decoding.
MOST_TOKENS = 131_072


class Outbox:
    """A count of tokens. Scored tokens of prompts and alternatives of log-probabilities count too.

    Only one thread writes each of the two sums, so it needs no lock.

    Args:
        limit: tokens that may wait; one step may exceed it.
    """

    def __init__(self, limit: int = MOST_TOKENS) -> None:
        self._limit = limit
        self._produced = 0
        self._written = 0

    @property
    def waiting(self) -> int:
        return self._produced - self._written

    @property
    def has_room(self) -> bool:
        return self.waiting < self._limit

    def add(self, emissions: Sequence[Emission]) -> None:
        """Called by the decode thread for what it has produced."""
        self._produced += _weight(emissions)

    def remove(self, emissions: Sequence[Emission]) -> None:
        """Called by the traffic thread for what it has delivered or dropped."""
        self._written += _weight(emissions)


def _weight(emissions: Sequence[Emission]) -> int:
    tokens = sum(len(emission.tokens) for emission in emissions)
    scored = [entry for each in emissions for entry in each.prompt_logprobs or ()]
    told = [entry for each in emissions for entry in each.logprobs or ()]
    return tokens + len(scored) + sum(len(entry.top) for entry in [*told, *scored])
