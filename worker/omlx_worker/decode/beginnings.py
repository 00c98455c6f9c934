"""Finds beginnings that prompts share, so that each is read once. Pure functions of tokens.

A row stops reading where the prompt of another row parts from its own. There the engine keeps what
it has read, and the other row goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omlx_worker.engine.rows.row import BULK, Row, Stage
from omlx_worker.engine.rows.tokens import in_common

SHORTEST = 64
"""Tokens of the shortest beginning that is worth a stop and a wait."""


def note(row: Row, others: Iterable[Row], unit: int = 1) -> None:
    """Note which rows share a beginning with a new row, and let all of them stop at its end.

    Args:
        unit: rows stop at multiples of it only.
    """
    if not row.request.cache:
        return
    last = len(row.request.prompt) - 1
    row.stops |= {mark - mark % unit for mark in row.request.marks if SHORTEST <= mark <= last}
    if row.level < BULK and last >= SHORTEST and not row.is_scored:
        row.stops.add(last - last % unit)  # a conversation may go on, or the prompt come again
    for other in others:
        alike = other.request.cache and other.request.salt == row.request.salt
        if alike and other.stage in (Stage.WAITING, Stage.READING):
            part = in_common(row.key, other.key)
            part = min(part, last, len(other.request.prompt) - 1)
            for one, kin in ((row, other), (other, row)):
                shared = min(part, one.shareable) // unit * unit
                if shared >= SHORTEST:
                    one.kin[kin] = shared
                    kin.stops.add(shared)


def awaits(row: Row, reading: Sequence[Row]) -> bool:
    """Whether another row is still reading a beginning that this row shares.

    A less urgent row is waited for only while it is the one that is read next: more urgent ones may
    keep it from reading for ever.

    Args:
        reading: the rows whose prompts are being read, the one that is read next first.
    """
    return any(
        row.kin.get(other, 0) >= other.computed + SHORTEST
        and (other is reading[0] or other.rank[0] <= row.rank[0])
        for other in reading
    )
