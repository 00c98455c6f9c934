"""Rows that a program gives: prompts, requests, records of its own, or a frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

from omlx_producer.bulk.records import Format, Record
from omlx_producer.bulk.table import Layout, TableForm
from omlx_producer.errors import InvalidRequest

CHUNK = 1024


@dataclass(frozen=True)
class Given:
    """Rows in memory.

    Attributes:
        kind: the format whose rules they follow. A text is a prompt in any.
        rows: texts, dictionaries or a frame.
        count: how many; None if they can be read only once.
    """

    kind: Format
    rows: Any
    count: int | None

    @property
    def records(self) -> Iterator[Record]:
        """The rows as records, numbered from 1."""
        return _numbered(_values(self.rows) if is_frame(self.rows) else self.rows)

    @classmethod
    def of(cls, rows: Any) -> Given:
        """Take rows: texts, dictionaries, or a frame of pandas or polars.

        Raises:
            InvalidRequest: if they are something else.
        """
        if is_frame(rows):
            return cls("csv", rows, len(rows))
        if not isinstance(rows, Iterable) or isinstance(rows, Mapping | bytes):
            raise InvalidRequest(
                "rows",
                f"got {type(rows).__name__}",
                "give a path, a frame, or texts or dictionaries",
            )
        return cls("jsonl", rows, len(rows) if isinstance(rows, Sized) else None)


def is_frame(rows: Any) -> bool:
    """Whether rows are a frame of pandas or polars, neither of which is imported here."""
    return hasattr(rows, "columns") and (_is_polars(rows) or hasattr(rows, "iloc"))


def with_answers(
    frame: Any, documents: Iterable[tuple[int, Mapping[str, Any]]], form: TableForm
) -> Any:
    """A frame of the same kind: the rows that have ended, with the columns of a table after theirs.

    With several choices, a row comes once for each.

    Args:
        documents: output lines, each with the number of its row, from 1.
    """
    layout = Layout(replace(form, kept=dict.fromkeys(frame.columns)))
    lines = [
        (number - 1, line) for number, document in documents for line in layout.lines(document, {})
    ]
    places = [place for place, _ in lines]
    answers = {
        column.name: [column.value(line) for _, line in lines]
        for column in layout.columns
        if column.name not in layout.kept
    }
    names = {name: column for column, name in layout.kept.items()}
    if _is_polars(frame):
        return frame[places].rename(names).hstack(type(frame)(answers))
    return frame.take(places).rename(columns=names).assign(**answers)


def _is_polars(frame: Any) -> bool:
    return hasattr(frame, "iter_rows")


def _values(frame: Any) -> Iterator[dict[str, Any]]:
    """The rows of a frame in Python's own types; what is missing is None."""
    if _is_polars(frame):
        yield from frame.iter_rows(named=True)
        return
    for start in range(0, len(frame), CHUNK):
        part = frame.iloc[start : start + CHUNK]
        for row in part.astype(object).where(part.notna(), None).to_dict("records"):
            yield {str(name): _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A value of NumPy as Python has it; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _numbered(rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, 1):
        if isinstance(row, str):
            yield Record(number, row)
        elif isinstance(row, Mapping):
            yield Record(number, dict(row))
        else:
            yield Record(number, None, f"got {row!r:.80}; give a text or a dictionary")
