"""The order in which rows run: common beginnings together, long and short rows mixed.

Rows change places only within a buffer of `BUFFER_ROWS` rows and `BUFFER_CHARACTERS` characters. So
memory is bounded and results come roughly in the order of the input.

Rows with different ``cache_salt`` share nothing, so they are in different groups. A worker takes
consecutive rows in one claim, so most rows of a group meet on one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omlx_producer.bulk.row import BadRow, Row, prompt_text

BUFFER_ROWS = 1024
BUFFER_CHARACTERS = 32 * 2**20
# Rows with this many characters in common form a group; those with this many times as many, again.
BEGINNING_CHARACTERS = 256
LONGER = 4


def balanced(rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
    """All rows, ordered within each buffer. Bad rows pass through at once."""
    buffer: list[Row] = []
    characters = 0
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        buffer.append(row)
        characters += row.characters
        if len(buffer) == BUFFER_ROWS or characters >= BUFFER_CHARACTERS:
            yield from arrange(buffer)
            buffer, characters = [], 0
    yield from arrange(buffer)


def arrange(rows: list[Row], characters: int = BEGINNING_CHARACTERS) -> list[Row]:
    """Order rows by groups with a common beginning, the group with the most work first.

    A group is ordered alike, by longer beginnings. Rows that share their beginning with no other
    form the last group, in which short rows fill the gaps that the groups leave.

    Args:
        characters: that rows of a group have in common.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (row.request.cache_salt or "", prompt_text(row.request)[:characters])
        groups.setdefault(key, []).append(row)
    shared = [(text, group) for (_, text), group in groups.items() if len(group) > 1]
    shared.sort(key=lambda entry: sum(row.work for row in entry[1]), reverse=True)
    ordered = []
    for text, group in shared:
        whole = len(text) < characters
        ordered += deal(group) if whole else arrange(group, LONGER * characters)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return ordered + deal(alone)


def deal(rows: list[Row]) -> list[Row]:
    """Order rows as longest, shortest, second longest, second shortest, and so on.

    Any stretch holds about the same work, so no worker gets all the long rows.
    """
    ranked = sorted(rows, key=lambda row: row.work, reverse=True)
    half = (len(ranked) + 1) // 2
    longer, shorter = ranked[:half], ranked[half:][::-1]
    dealt = [row for pair in zip(longer, shorter, strict=False) for row in pair]
    return dealt + longer[len(shorter) :]
