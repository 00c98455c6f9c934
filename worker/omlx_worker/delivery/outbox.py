"""How much the decode thread has produced that Redis has not taken yet.

While Redis is away, decoding goes on and its tokens wait in the worker. Beyond a bound it pauses:
a worker that cannot deliver must not fill the memory that its model lives in.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.engine.interface import Emission

# At about 200 bytes a token, some 25 MB; several minutes of decoding.
MOST_TOKENS = 131_072


class Outbox:
    """A count of tokens, alternatives of log-probabilities counted like tokens.

    Each of the two sums is written by one thread only, so there is no lock.

    Args:
        limit: tokens that may wait; one more step is taken before the bound shows.
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
        """The decode thread has produced them."""
        self._produced += _weight(emissions)

    def remove(self, emissions: Sequence[Emission]) -> None:
        """The traffic thread is done with them."""
        self._written += _weight(emissions)


def _weight(emissions: Sequence[Emission]) -> int:
    tokens = sum(len(emission.tokens) for emission in emissions)
    return tokens + sum(len(entry.top) for e in emissions for entry in e.logprobs or ())
