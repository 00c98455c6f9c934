"""What a schema costs: the answers of the same rows with it and without it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from omlx_producer.bulk.result import BulkResult
from omlx_producer.bulk.row import BadRow, BatchRow, Row, RowResult, as_document
from omlx_producer.terminal import counted

_OPENS = re.compile(r"[\[{]")


def has_schema(row: Row | BadRow | BatchRow) -> bool:
    """Whether its answer is JSON, by a schema or any object."""
    constraint = row.request.constraint if isinstance(row, Row) else None
    return constraint is not None and constraint.kind.startswith("json")


def without_schema(rows: Iterable[Row | BadRow]) -> Iterator[Row]:
    """Those of the rows that have a schema, without it."""
    free = {"response_format": None, "structured_outputs": None}
    for row in rows:
        if isinstance(row, Row) and has_schema(row):
            yield replace(row, request=row.request.model_copy(update=free))


class Answers(NamedTuple):
    """The answers of one side, with or without the schema, together.

    Attributes:
        items: of the largest array of each answer; None if no answer has an array.
        completion_tokens: all that were generated, thinking included.
    """

    items: int | None
    completion_tokens: int

    @classmethod
    def of(cls, answers: Iterable[tuple[RowResult, Any]]) -> Self:
        """Those of these results, each with the JSON in it."""
        items, tokens = [], 0
        for result, found in answers:
            tokens += result.usage.completion_tokens
            if (most := most_items(found)) is not None:
                items.append(most)
        return cls(sum(items) if items else None, tokens)


@dataclass(frozen=True)
class Comparison:
    """The two sides of the rows that have an answer on both.

    Attributes:
        differ: rows whose answers hold other JSON.
        without_json: rows whose answer holds no complete JSON without the schema. They differ too.
    """

    rows: int
    differ: int
    without_json: int
    with_schema: Answers
    without_schema: Answers

    @classmethod
    def of(cls, bound: Iterable[RowResult], free: Iterable[RowResult]) -> Self:
        """Compare results with a schema and without it, by their rows."""
        others = {result.row.key: result for result in free if result.ok}
        pairs = [(one, others[one.row.key]) for one in bound if one.row.key in others]
        left = [(one, json_in(_text(one))) for one, _ in pairs]
        right = [(other, json_in(_text(other))) for _, other in pairs]
        found = [(a, b) for (_, a), (_, b) in zip(left, right, strict=True)]
        return cls(
            len(pairs),
            sum(a != b or b is None for a, b in found),
            sum(b is None for _, b in found),
            Answers.of(left),
            Answers.of(right),
        )

    def told(self) -> str:
        """A table, and a sentence."""
        sides = {"with the schema": self.with_schema, "without it": self.without_schema}
        lines = [f"{'':15}  {'items':>8}  {'tokens':>8}"]
        for name, (items, tokens) in sides.items():
            lines.append(f"{name:15}  {'-' if items is None else items:>8}  {tokens:>8}")
        whole = self.rows - self.without_json
        lines.append(
            f"{self.differ} of {counted(self.rows, 'row')} differ; without the schema "
            f"{whole} of {self.rows} hold complete JSON"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        sides = {"with_schema": self.with_schema, "without_schema": self.without_schema}
        return asdict(self) | {name: side._asdict() for name, side in sides.items()}


def json_in(text: str) -> Any:
    """The JSON that a text is, else the longest object or array in it; None without one."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    longest, found = 0, None
    for match in _OPENS.finditer(text):
        with contextlib.suppress(ValueError, RecursionError):
            value, end = json.JSONDecoder().raw_decode(text, match.start())
            if end - match.start() > longest:
                longest, found = end - match.start(), value
    return found


def most_items(value: Any) -> int | None:
    """The length of the largest array in a value of JSON; None if it has none."""
    most, left = None, [value]
    while left:
        inner = left.pop()
        if isinstance(inner, list):
            most = max(most or 0, len(inner))
            left += inner
        elif isinstance(inner, dict):
            left += inner.values()
    return most


def _text(result: RowResult) -> str:
    return BulkResult.of(as_document(result)).text or ""
