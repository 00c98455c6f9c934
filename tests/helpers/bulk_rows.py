"""Rows for a batch, and a sink of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from omlx_producer.bulk.batch import Batch, run_batches
from omlx_producer.bulk.row import Row, RowResult, digest_of
from omlx_producer.wire import GenerationRequest
from tests.helpers.workers import ALIAS

RUN = "01234567"
QUEUE = f"omlx:{ALIAS}:bulk"


def rows(count: int, start: int = 0, **fields: Any) -> list[Row]:
    made = []
    for number in range(start, start + count):
        options = {"model": ALIAS, "max_completion_tokens": 4, **fields}
        request = GenerationRequest(prompt=f"prompt {number}", **options)
        digest = digest_of(f"r{number}", request.to_wire())
        made.append(Row(f"r{number}", number + 1, request, digest))
    return made


def batches_of_run(connection: redis.Redis) -> list[Batch]:
    """The batches of the run, the oldest first."""
    states = sorted(run_batches(connection, RUN), key=lambda state: state.created_at)
    return [Batch(connection, state.id) for state in states]


def waiting_rows(connection: redis.Redis) -> list[bytes]:
    """The entries of the run's rows that wait."""
    keys = [batch.waiting_key(QUEUE) for batch in batches_of_run(connection)]
    return [entry for key in keys for entry in connection.lrange(key, 0, -1)]


def rows_in_redis(connection: redis.Redis) -> int:
    """How many rows of the run have no result, or one that nobody has taken."""
    states = run_batches(connection, RUN)
    return sum(state.left for state in states) + sum(
        connection.hlen(batch.results_key) for batch in batches_of_run(connection)
    )


@dataclass
class Kept:
    """A sink in memory."""

    results: list[RowResult] = field(default_factory=list)

    def commit(self, results: Sequence[RowResult]) -> None:
        self.results += results

    @property
    def names(self) -> list[str]:
        return sorted(str(result.row.custom_id) for result in self.results)


def names(expected: Sequence[Row]) -> list[str]:
    return sorted(row.custom_id for row in expected)


def batch_of(connection: redis.Redis, count: int, **fields: Any) -> Batch:
    batch = Batch.create(connection)
    batch.upload(rows(count, **fields))
    return batch
