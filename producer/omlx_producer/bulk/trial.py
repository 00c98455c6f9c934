"""A trial of the first rows of an input: what they answer, how long all rows would take, and what a
schema costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omlx_producer.bulk.comparison import Comparison, has_schema, without_schema
from omlx_producer.bulk.driver import Check
from omlx_producer.bulk.input import Client
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.progress import Show
from omlx_producer.bulk.result import BulkResult
from omlx_producer.bulk.row import RowResult, as_document
from omlx_producer.bulk.stream import stream_results
from omlx_producer.terminal import counted, duration, write

SHOWN = 2


@dataclass
class Trial:
    """What was tried.

    Attributes:
        answers: a line ``id: text`` for each of the first rows, or ``id: reason`` if it failed.
        comparison: of rows with a schema to the same rows without it; None if there are none.
    """

    rows: int = 0
    failed: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    answers: list[str] = field(default_factory=list)
    comparison: Comparison | None = None

    def estimate(self, rows: int) -> float:
        """Seconds that this many rows would take."""
        return self.seconds * rows / self.rows if self.rows else 0.0

    def told(self, rows: int) -> str:
        """The comparison and the estimate in words."""
        compared = f"{self.comparison.told()}\n" if self.comparison else ""
        return (
            f"{compared}all {counted(rows, 'row')}: about {duration(self.estimate(rows))} at "
            f"{self.tokens_per_second:.0f} tokens/s"
        )

    def as_dict(self, rows: int) -> dict[str, Any]:
        """The figures, with the estimate for this many rows."""
        found = {
            "rows": self.rows,
            "failed": self.failed,
            "seconds": round(self.seconds, 2),
            "completion_tokens_per_second": round(self.tokens_per_second, 1),
            "estimated_seconds": round(self.estimate(rows)),
        }
        return found | ({"schema": self.comparison.as_dict()} if self.comparison else {})


def try_rows(client: Client, options: RunOptions, rows: int, show: Show, check: Check) -> Trial:
    """Run the first rows, those with a schema also without it, and keep none of their results.

    Args:
        check: see `Driver`.

    Raises: the errors of `omlx_producer.bulk.run.run_here`.
    """
    first = min(rows, options.limit or rows)
    options, trial, meter = options.model_copy(update={"limit": first}), Trial(), Meter()
    bound: list[RowResult] = []
    for result in stream_results(client, options, ordered=True, progress=show, check=check):
        meter.count([result])
        if result.ok and has_schema(result.row):
            bound.append(result)
        if len(trial.answers) < SHOWN:
            row = BulkResult.of(as_document(result))
            trial.answers.append(
                f"{row.custom_id}: {row.reason if row.completion is None else row.text}"
            )
    trial.rows, trial.failed, trial.seconds = meter.done, meter.failed, meter.seconds
    trial.tokens_per_second = meter.completion_tokens / max(meter.seconds, 1e-9)
    if bound:
        write(f"now {counted(len(bound), 'row')} without the schema, to compare\n", err=True)
        free = stream_results(client, options, progress=show, check=check, change=without_schema)
        trial.comparison = Comparison.of(bound, free)
    return trial
