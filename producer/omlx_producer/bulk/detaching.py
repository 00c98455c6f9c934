"""Leaving a run to Redis, and fetching what came of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from omlx_producer.bulk.batch import Batch, BatchState
from omlx_producer.bulk.export import export
from omlx_producer.bulk.index import RowIndex
from omlx_producer.bulk.journal import replacing
from omlx_producer.bulk.lines import read_line
from omlx_producer.bulk.making import RowMaker
from omlx_producer.bulk.output import errors_path, results_path
from omlx_producer.bulk.planning import Plan, plan_rows
from omlx_producer.bulk.readers import read_records
from omlx_producer.bulk.running import Job, open_input
from omlx_producer.client import Producer


def detach_job(producer: Producer, job: Job) -> Batch:
    """Put all rows of a job into a new batch; rows that can never run have their error at once.

    Raises:
        InvalidRequest: if the input is none.
        redis.exceptions.RedisError: if Redis does not answer; the batch is never fed then.
    """
    maker = RowMaker(
        job.kind, job.shape, producer.models(), require_known_model=job.require_known_model
    )
    batch = Batch.create(
        producer.connection, priority=job.priority, window=job.window, job_timeout=job.job_timeout
    )
    with contextlib.closing(RowIndex()) as index, open_input(job.input) as stream:
        batch.upload(plan_rows(read_records(stream, job.kind), maker.make, index, Plan()))
    return batch


def write_results(batch: Batch, state: BatchState, output: Path) -> None:
    """Write the results of a batch, and its errors, as a run on this machine does.

    Raises:
        OSError: if a file can not be written.
    """
    results = results_path(output)
    with replacing(results) as good, replacing(errors_path(output)) as bad:
        for line in batch.results(state.rows):
            written = read_line(line)
            (good if written is not None and written.ok else bad).write(line)
    if results != output:
        export(results, output)
