"""Where results go before Redis lets them go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omlx_producer.bulk.row import RowResult


class Sink(Protocol):
    """The place that says which rows are done."""

    def commit(self, results: Sequence[RowResult]) -> None:
        """Return when the results would survive anything; until then their jobs stay in Redis.

        A sink may be given a result again whose commit was cut off; it must count it once.
        """
