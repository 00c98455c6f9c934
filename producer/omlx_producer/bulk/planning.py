"""Which rows are to run: not those that are done, and none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from omlx_producer.bulk.index import RowIndex
from omlx_producer.bulk.readers import Record
from omlx_producer.bulk.row import BadRow, Row


@dataclass(slots=True)
class Plan:
    """What has been read of the input so far.

    Attributes:
        rows: rows of the input.
        done: those of them that have a result, or an error, from an earlier run.
        left: those that this run does not touch: no failures, where only failures are retried.
    """

    rows: int = 0
    done: int = 0
    left: int = 0


def plan_rows(
    records: Iterable[Record],
    make: Callable[[Record], Row | BadRow],
    index: RowIndex,
    plan: Plan,
    *,
    only_failures: bool = False,
) -> Iterator[Row | BadRow]:
    """The rows that have no result yet, in the order of the input.

    A row has one if the index knows its key with the same digest, so an edited row runs again.

    Args:
        only_failures: the rows that have failed, instead.
    """
    for record in records:
        row = make(record)
        before = index.see(row.key, row.line)
        if before is not None:
            row = _duplicate(row, before)
            index.see(row.key, row.line)
        plan.rows += 1
        known = index.known(row.key)
        if only_failures:
            run = known is not None and not known.ok
            run = run and not (isinstance(row, BadRow) and known and known.digest == row.digest)
            plan.left += not run
        else:
            run = known is None or known.digest != row.digest
            plan.done += not run
        if run:
            yield row


def _duplicate(row: Row | BadRow, before: int) -> BadRow:
    reason = (
        f"line {row.line}: custom_id {row.custom_id!r} was given at line {before} already; "
        "give each row its own"
    )
    if isinstance(row, BadRow):
        return replace(row, code="duplicate_custom_id", reason=reason, own_id=False)
    return BadRow(row.line, row.custom_id, "duplicate_custom_id", reason, row.digest, False)
