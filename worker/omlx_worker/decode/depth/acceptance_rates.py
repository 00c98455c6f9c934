"""How many drafts of a row are likely to be accepted: its own record, and before that the model's.

A row's rate at a draft position is that of drafts whose predecessors were all accepted, an
exponential average that starts from what is expected there: at the first position the model's
rate over all rows, later the row's own rate one position before, times how the model's rates
compare there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

ROW_MEMORY = 0.985
"""What one more draft leaves of a row's record: it remembers about 65 drafts."""

MODEL_MEMORY = 0.9995
"""The same for the model's record: about 2,000 drafts."""

PRIOR = 4.0
"""Drafts that a row's prior counts for; rates that differ by 0.2 from row to row make it 4."""

FIRST_RATE, NEXT_RATE = 0.65, 0.92
"""A model's rates before anything is known: at the first position, and relative to the last."""

CURIOUS = 64.0
"""Drafts after which a row's record needs no benefit of the doubt."""

FUTILE, FUTILE_DRAFTS = 0.05, 24.0
"""A row below this rate after so many drafts stops drafting for a while."""

RETRY_AFTER = 16.0
"""What is left of those drafts when it tries again, so that it gets about eight more."""

FRESH = 8
"""A row's expectations are worked out anew once one draft in so many of its record are new."""

AGE = 32
"""Steps after which every row's expectations are, for the model's record moves on, too."""

REST, LONGEST_REST = 64, 4096
"""Steps until such a row tries again; twice as many each time it fails."""


@dataclass(slots=True)
class _Record:
    """Drafts judged and accepted at each position, and what follows from them.

    Attributes:
        expected: drafts accepted on average when drafting 0, 1, ... deep.
        doubt: by how much each of them may be too low, as long as little is known; squared.
        news: drafts judged since those were worked out.
        rest: steps left without drafts.
        next_rest: how long the next such time is.
    """

    tries: list[float]
    hits: list[float]
    expected: list[float] = field(default_factory=list)
    doubt: list[float] = field(default_factory=list)
    news: int = 0
    rest: int = 0
    next_rest: int = REST

    def add(self, drafted: int, accepted: int, memory: float) -> None:
        for position in range(min(drafted, accepted + 1, len(self.tries))):
            self.tries[position] = self.tries[position] * memory + 1
            self.hits[position] = self.hits[position] * memory + (position < accepted)


class AcceptanceRates:
    """Acceptance of every row there is, and of the model.

    Args:
        max_depth: drafts a step, at most.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._model = self._blank()
        self._rows: dict[str, _Record] = {}
        self._accepted: dict[tuple[tuple[tuple[str, int], ...], int], list[float]] = {}
        self._calls = 0

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, row_ids: Iterable[str]) -> None:
        """Make sure of these rows and forget all others."""
        wanted = dict.fromkeys(row_ids)
        if wanted.keys() != self._rows.keys():
            for gone in self._rows.keys() - wanted.keys():
                del self._rows[gone]
            for row_id in wanted.keys() - self._rows.keys():
                self._rows[row_id] = self._blank()
                self._expect(self._rows[row_id])
        self._calls += 1
        if self._calls % AGE == 0:
            for record in self._rows.values():
                self._expect(record)

    def observe(self, row_id: str, drafted: int, accepted: int) -> None:
        """Take in how a row's drafts fared; of rows not kept only the model learns."""
        record = self._rows.get(row_id)
        if not drafted:
            if record and record.rest:
                record.rest -= 1
            return
        self._model.add(drafted, accepted, MODEL_MEMORY)
        if record is None:
            return
        record.add(drafted, accepted, ROW_MEMORY)
        record.news += 1
        if FRESH * record.news >= record.tries[0]:
            self._expect(record)
        if record.tries[0] < FUTILE_DRAFTS:
            return
        share = record.hits[0] / record.tries[0]
        if share < FUTILE:
            record.rest = record.next_rest
            record.next_rest = min(2 * record.next_rest, LONGEST_REST)
            # Some of the evidence goes, so that the next attempt lasts a few drafts and counts.
            kept = RETRY_AFTER / record.tries[0]
            record.tries = [kept * tries for tries in record.tries]
            record.hits = [kept * hits for hits in record.hits]
        elif share > 2 * FUTILE:
            record.next_rest = REST

    def rests(self, row_id: str) -> bool:
        """Whether a row's drafts failed so often that it should not draft for now."""
        record = self._rows.get(row_id)
        return record is not None and record.rest > 0

    def accepted(self, limits: Iterable[tuple[str, int]], depth: int) -> list[float]:
        """Drafts accepted in one step over all rows, for every depth from 0 to ``depth``.

        Rows that were hardly heard get the benefit of the doubt, but only as much as their doubts
        add up to: many strangers are as good as the model's average, one may be much better.

        Args:
            limits: rows, and the most drafts that each gets.
        """
        asked = (tuple(limits), depth)
        if asked not in self._accepted:
            records = [(self._rows[row_id], limit) for row_id, limit in asked[0]]
            sure = [_up_to(record.expected, limit, depth) for record, limit in records]
            maybe = [_up_to(record.doubt, limit, depth) for record, limit in records]
            columns = zip(zip(*sure, strict=True), zip(*maybe, strict=True), strict=True)
            self._accepted[asked] = [sum(some) + sqrt(sum(doubt)) for some, doubt in columns]
        return self._accepted[asked]

    def of_row(self, row_id: str) -> list[float]:
        """Drafts of a row accepted on average when drafting 0, 1, ... deep."""
        return list(self._rows[row_id].expected)

    def to_json(self) -> list[list[float]]:
        return [self._model.tries, self._model.hits]

    def restore(self, entries: Sequence[Any]) -> None:
        """Take up the model's record as `to_json` left it.

        Raises:
            ValueError, TypeError: it is something else.
        """
        tries, hits = ([float(value) for value in values] for values in entries)
        if len(tries) != len(hits) or not all(
            0 <= hit <= judged for hit, judged in zip(hits, tries, strict=True)
        ):
            raise ValueError("more drafts accepted than judged")
        blank = self._blank().tries
        self._model.tries = (tries + blank)[: self._max_depth]
        self._model.hits = (hits + blank)[: self._max_depth]

    def _blank(self) -> _Record:
        return _Record([0.0] * self._max_depth, [0.0] * self._max_depth)

    def _expect(self, record: _Record) -> None:
        """Work out a row's expectations from its record and the model's."""
        self._accepted.clear()
        record.news = 0
        record.expected, record.doubt = [0.0], [0.0]
        model, rate, reach, hopeful, doubt = 1.0, 1.0, 1.0, 1.0, 0.0
        for position in range(self._max_depth):
            default = FIRST_RATE if position == 0 else model * NEXT_RATE
            tries, hits = self._model.tries[position], self._model.hits[position]
            before, model = model, (8 * default + hits) / (8 + tries)
            prior = min(rate * model / max(before, 1e-6), 1.0)
            tries, hits = record.tries[position], record.hits[position]
            rate = (PRIOR * prior + hits) / (PRIOR + tries)
            reach *= rate
            record.expected.append(record.expected[-1] + reach)
            curiosity = max(0.0, 1 - record.tries[0] / CURIOUS)
            spread = sqrt(rate * (1 - rate) / (PRIOR + record.tries[0] + 1))
            hopeful *= min(rate + curiosity * spread, 1.0)
            doubt += hopeful - reach
            record.doubt.append(doubt**2)


def _up_to(values: list[float], limit: int, depth: int) -> list[float]:
    """Those of 0, 1, ... ``depth`` drafts, where a row gets ``limit`` at most."""
    if limit >= depth:
        return values[: depth + 1]
    return values[: limit + 1] + [values[limit]] * (depth - limit)
