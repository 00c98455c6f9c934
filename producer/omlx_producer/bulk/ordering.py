"""The order in which rows run: common beginnings together, long and short rows mixed.

Rows change places only within a buffer of `BUFFER_ROWS` rows and `BUFFER_CHARACTERS` characters. So
memory is bounded and results come roughly in the order of the input.

Rows with different ``cache_salt`` share nothing, so they are in different groups. Rows of a group
name their beginning, by which the workers of a queue share out the groups; see claim.lua in
`omlx_worker.queue`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

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


def arrange(
    rows: list[Row], characters: int = BEGINNING_CHARACTERS, beginning: str = ""
) -> list[Row]:
    """Order rows by groups with a common beginning, the group with the most work first.

    A group is ordered alike, by longer beginnings. Rows that share their beginning with no other
    form the last group, in which short rows fill the gaps that the groups leave.

    Args:
        characters: that rows of a group have in common.
        beginning: the name of what all rows have in common.

    Returns:
        The rows, each with the name of the longest beginning that it shares.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (row.request.cache_salt or "", prompt_text(row.request)[:characters])
        groups.setdefault(key, []).append(row)
    shared = [(*key, group) for key, group in groups.items() if len(group) > 1]
    shared.sort(key=lambda entry: sum(row.work for row in entry[2]), reverse=True)
    ordered = []
    for salt, text, group in shared:
        whole = len(text) < characters
        salted = hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""
        name = hashlib.blake2b(text.encode(), digest_size=8, key=salted).hexdigest()
        ordered += _named(group, name) if whole else arrange(group, LONGER * characters, name)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return ordered + _named(alone, beginning)


def _named(rows: list[Row], beginning: str) -> list[Row]:
    return [replace(row, beginning=beginning) for row in deal(rows)]


def deal(rows: list[Row]) -> list[Row]:
    """Order rows as longest, shortest, second longest, second shortest, and so on.

    Any stretch holds about the same work, so no worker gets all the long rows.
    """
    ranked = sorted(rows, key=lambda row: row.work, reverse=True)
    half = (len(ranked) + 1) // 2
    longer, shorter = ranked[:half], ranked[half:][::-1]
    dealt = [row for pair in zip(longer, shorter, strict=False) for row in pair]
    return dealt + longer[len(shorter) :]
