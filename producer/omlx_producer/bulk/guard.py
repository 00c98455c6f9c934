"""Ends a run at once whose options no row can have."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_producer.bulk.output import OutputFiles
from omlx_producer.bulk.row import Row, RowResult
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.structure import Constraint


class Guard:
    """A sink that ends a run whose options a worker refuses, before it writes any row.

    Once a row has succeeded, a refusal concerns that row.

    Args:
        constraint: that the options give to every row; None for none.
        proven: whether a row has succeeded.
    """

    def __init__(self, files: OutputFiles, constraint: Constraint | None, *, proven: bool) -> None:
        self._files = files
        self._constraint = constraint
        self._proven = proven or constraint is None

    def commit(self, results: Sequence[RowResult]) -> None:
        """Write results to the files.

        Raises:
            InvalidRequest: the first refusal.
        """
        if not self._proven:
            self._proven = any(result.ok for result in results)
        if not self._proven:
            for result in results:
                if self._is_refused(result):
                    raise InvalidRequest(result.reason)
        self._files.commit(results)

    def _is_refused(self, result: RowResult) -> bool:
        return (
            result.code == "invalid_request"
            and isinstance(result.row, Row)
            and result.row.request.constraint == self._constraint
            and result.reason.startswith(("response_format", "structured_outputs"))
        )
