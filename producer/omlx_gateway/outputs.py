"""The output and the error file of a batch: its result lines in Redis, read on demand.

So they have no records and no bytes of their own, and every gateway has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from redis import Redis

from omlx_producer.bulk.batch import Batch, BatchState
from omlx_producer.errors import UnknownJob
from omlx_producer.wire.keys import KEEP_SECONDS

_ID = re.compile(r"file-([0-9a-f]{12})0{11}([01])")


def output_ids(run: str) -> tuple[str, str]:
    """The ids of a batch's output file and of its error file."""
    return f"file-{run}{0:012}", f"file-{run}{1:012}"


@dataclass(frozen=True)
class OutputFile:
    """A file that a batch writes: its rows with a response, or those that failed."""

    batch: Batch
    kind: Literal["output", "error"]

    @classmethod
    def of(cls, connection: Redis, file_id: str) -> OutputFile | None:
        """The file with this id; None if it is not one of a batch."""
        found = _ID.fullmatch(file_id)
        if found is None:
            return None
        return cls(Batch.of_run(connection, found[1]), "error" if found[2] == "1" else "output")

    def record(self) -> dict[str, str]:
        """What the record of an upload says; empty until the batch is over, if it has no lines, was
        deleted or has expired.

        Raises:
            UnknownJob: if results of it are missing.
        """
        found = self.batch.fields()
        if not found or f"{self.kind}_deleted" in found:
            return {}
        state = BatchState.of_any(self.batch.id, found)
        if not state.over or not (state.ok if self.kind == "output" else state.errors):
            return {}
        ended = int(state.ended_at or 0)
        return {
            "filename": f"batch_{self.batch.run}_{self.kind}.jsonl",
            "bytes": found.get(f"{self.kind}_bytes") or self._count(),
            "purpose": "batch_output",
            "created_at": str(ended),
            "expires_at": str(ended + KEEP_SECONDS),
        } | ({"owner": found["owner"]} if "owner" in found else {})

    def lines(self) -> Iterator[bytes]:
        """Its lines, in the order of the input.

        Raises:
            UnknownJob: at once if the batch has expired or results of it are missing; after the
                last line if some went meanwhile.
        """
        state = self.batch.read()
        if self.batch.connection.hlen(self.batch.results_key) < state.ok + state.errors:
            raise UnknownJob(f"results of {self.batch.id} were deleted, or have expired")
        return (line for line in self.batch.results(state) if kind_of(line) == self.kind)

    def delete(self) -> None:
        """Forget the file. Its lines expire with the batch."""
        self.batch.note(**{f"{self.kind}_deleted": "1"})

    def _count(self) -> str:
        """Its bytes, which do not change any more."""
        size = str(sum(map(len, self.lines())))
        self.batch.note(**{f"{self.kind}_bytes": size})
        return size


def kind_of(line: bytes) -> Literal["output", "error"]:
    """The file of an output line."""
    return "output" if json.loads(line)["error"] is None else "error"
