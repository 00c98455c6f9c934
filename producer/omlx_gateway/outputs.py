"""The output and the error file of a batch: its result lines in Redis, read on demand.

So they have no bytes on disk, and every gateway has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from redis import Redis

from omlx_gateway.errors import ApiError
from omlx_producer.bulk.batch import Batch
from omlx_producer.errors import UnknownJob


def output_lines(connection: Redis, batch_id: str, *, errors: bool) -> Iterator[bytes]:
    """The lines of one of its files, in the order of the input.

    Args:
        batch_id: of the batch in the queue.
        errors: those of rows that failed, else those of rows with a response.

    Raises:
        ApiError: 404, at once, if the results have been deleted.
    """
    batch = Batch(connection, batch_id)
    try:
        rows = batch.read().rows
    except UnknownJob:
        raise ApiError(404, f"the results of {batch_id} were deleted, or have expired") from None
    return (line for line in batch.results(rows) if is_error(line) == errors)


def is_error(line: bytes) -> bool:
    """Whether an output line is one of a row without a response."""
    return json.loads(line)["error"] is not None
