"""Which rows run, each once, and in which order.

Rows without a result run: common prefixes together, long and short rows mixed. Rows change places
only within a buffer of `BUFFER_ROWS` rows, which hold `BUFFER_SIZE` at most. So memory is bounded
and results come roughly in the order of the input.

Rows with different ``cache_salt`` share nothing, so they are in different groups. A worker takes
consecutive rows in one claim, so most rows of a group meet on one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from omlx_producer.bulk.row import REFUSED, BadRow, Row
from omlx_producer.bulk.store import Store

BUFFER_ROWS = 1024
BUFFER_SIZE = 32 * 2**20
# Rows that begin with the same characters, this many, form a group.
PREFIX_CHARACTERS = 256
# Within a group, those with this many times as many in common form one again.
LONGER = 4


@dataclass(slots=True)
class Seen:
    """What the input has shown so far.

    Attributes:
        rows: rows of the input.
        done: rows that have a result, or an error, from an earlier run.
        failed: rows of ``done`` that have an error; of a run of failures alone, all that have one.
        unrun: of a run of failures alone, rows that have neither a result nor an error.
        all: whether it has come to its end.
    """

    rows: int = 0
    done: int = 0
    failed: int = 0
    unrun: int = 0
    all: bool = False


def plan_rows(
    rows: Iterable[Row | BadRow],
    store: Store,
    seen: Seen,
    *,
    only_failures: bool = False,
    refused_too: bool = False,
) -> Iterator[Row | BadRow]:
    """The rows that have neither a result nor an error yet, in the order of the input.

    An edited row has another digest, so it runs again.

    Args:
        only_failures: yield instead the failed rows that may succeed now: those that were not
            refused, and those that were edited since.
        refused_too: take also those that a worker refused.
    """
    for row in rows:
        known = store.see(row)
        if known.line != row.line:
            row = _duplicate(row, known.line or 0)
            known = store.see(row)
        seen.rows += 1
        same = known.has_failed
        if only_failures:
            failure = known.failure
            seen.failed += failure is not None
            seen.unrun += failure is None and known.done is None
            refused = failure is not None and failure.code in REFUSED and not refused_too
            final = isinstance(row, BadRow) or refused
            run = failure is not None and not known.is_done and not (same and final)
        else:
            run = not same and not known.is_done
            seen.done += not run
            seen.failed += same
        if run:
            yield row
    seen.all = True


def _duplicate(row: Row | BadRow, before: int) -> BadRow:
    reason = (
        f"line {row.line}: the id {row.custom_id!r} was given at line {before} already; "
        "give each row its own"
    )
    if isinstance(row, BadRow):
        return replace(row, code="duplicate_custom_id", reason=reason, own_id=False, field="")
    return BadRow(row.line, row.custom_id, "duplicate_custom_id", reason, row.digest, False)


def balanced(rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
    """All rows, ordered within each buffer. Bad rows pass through at once."""
    buffer: list[Row] = []
    held = 0
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        buffer.append(row)
        held += row.held
        if len(buffer) == BUFFER_ROWS or held >= BUFFER_SIZE:
            yield from arrange(buffer)
            buffer, held = [], 0
    yield from arrange(buffer)


def arrange(rows: list[Row], characters: int = PREFIX_CHARACTERS) -> list[Row]:
    """Order rows by groups with a common prefix, the group with the most work first.

    A group is ordered alike, by longer prefixes. Rows that share their prefix with no other
    form the last group, in which short rows fill the gaps that the groups leave.

    Args:
        characters: that rows of a group have in common.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (row.request.cache_salt or "", row.request.prompt_text[:characters])
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
