"""How many drafts rows may be expected to accept.

Drafts are the model's own, or found: looked up in earlier text, or forced by a grammar. Steps that
draft deeper than the model's own depth have found drafts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from omlx_worker.engine.rows.emission import Emission

# In steps: after which counts are halved, that a guess counts for, and that a share is taken over.
MEMORY, PRIOR, RECENT = 50, 4, 8
GUESS = 0.8  # the rate of a first draft: high, so that some are made


class RowView(NamedTuple):
    """What a policy sees of a row that decodes.

    Attributes:
        limit: the most drafts a step that this row may have; 0 where it must not draft.
        context: tokens in its cache.
        constrained: whether a grammar may force drafts on it.
    """

    row_id: str
    limit: int
    context: int = 0
    constrained: bool = False


class FadingCounts:
    """Drafts judged and accepted at each place of a window, a row and step.

    Old ones fade as new ones of their place are judged.
    """

    def __init__(self, places: int) -> None:
        self._judged, self._accepted = [0.0] * places, [0.0] * places

    def add(self, drafted: int, accepted: int, share: float) -> None:
        """Count what this share of a step's rows drafted."""
        for place in range(min(accepted + 1, drafted)):
            self._judged[place] += share
            self._accepted[place] += share * (place < accepted)
            if self._judged[place] > MEMORY:
                self._judged[place] /= 2
                self._accepted[place] /= 2

    def chances(self) -> list[float]:
        """That each draft is accepted. A place is guessed to be like the one before it."""
        rates = [GUESS]
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            rates.append((PRIOR * rates[-1] + accepted) / (PRIOR + judged))
        return list(accumulate(rates[1:], mul))


class Acceptance:
    """What became of drafts: of at most ``max_depth``, up to ``own_depth`` are the model's own.

    All is kept by whether a grammar constrains the row, and by whether the drafts were found.
    """

    def __init__(self, max_depth: int, own_depth: int) -> None:
        self._places = {False: own_depth, True: max_depth}
        kinds = product((False, True), repeat=2)
        self._records = {kind: FadingCounts(self._places[kind[1]]) for kind in kinds}
        # Rows with found drafts. At first lookups find nothing, and grammars force half the tokens.
        self._shares = {False: 0.0, True: 0.5}
        self._constrained: set[str] = set()

    def observe(self, emissions: Sequence[Emission], depth: int) -> None:
        """Learn from a step that judged up to ``depth`` drafts a row."""
        alike = Counter(
            (row.row_id in self._constrained, row.source != "model", row.drafted, row.accepted)
            for row in emissions
        )
        for (constrained, found, drafted, accepted), count in alike.items():
            share = count / len(emissions)
            if drafted:
                self._records[constrained, found].add(drafted, accepted, share)
            # Without drafts a lookup still tells whether it found any; a grammar does not.
            if depth or not constrained:
                self._shares[constrained] += share * (found - self._shares[constrained]) / RECENT

    def expected(self, rows: Sequence[RowView]) -> list[float]:
        """Drafts that these rows together accept in a step, by its depth."""
        self._constrained = {row.row_id for row in rows if row.constrained}
        gains = {found: [0.0] * places for found, places in self._places.items()}
        alike = Counter((row.constrained, row.limit) for row in rows)
        for (constrained, limit), count in alike.items():
            share = self._shares[constrained]
            for found, part in ((False, 1 - share), (True, share)):
                chances = self._records[constrained, found].chances() if part else []
                for place, chance in enumerate(chances[:limit]):
                    gains[found][place] += count * part * chance
        totals = list(accumulate(gains[True], initial=0.0))
        for depth, accepted in enumerate(accumulate(gains[False], initial=0.0)):
            totals[depth] += accepted
        return totals
