"""The result of a row, as a program reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omlx_producer.bulk.output import real_path
from omlx_producer.bulk.row import read_line
from omlx_producer.bulk.store import errors_path, results_path
from omlx_producer.wire import Completion
from omlx_producer.wire.answer import as_completion


@dataclass(frozen=True, slots=True)
class BulkResult:
    """How a row of a run or of a batch has ended.

    Attributes:
        custom_id: None if the row has no valid one.
        completion: as of a job; None if the row failed.
        code: of the failure, such as ``invalid_request``; "" without one.
        reason: of the failure, a sentence.

    >>> [result.text for result in producer.run(["def f(x):"])]
    ['...']
    """

    custom_id: str | None
    completion: Completion | None = None
    code: str = ""
    reason: str = ""

    @property
    def text(self) -> str | None:
        """The text of the first choice; None if the row failed."""
        return None if self.completion is None else self.completion.text

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The result that an output line holds."""
        if error := document["error"]:
            return cls(document["custom_id"], None, error["code"], error["message"])
        body = document["response"]["body"]
        return cls(document["custom_id"], Completion(dict(as_completion(body))))


def read_results(output: Path | str) -> Iterator[BulkResult]:
    """The rows of the output of a run or a batch: the results, then the errors, as they are there.

    >>> [result.text for result in read_results(output)]
    ['...']

    Args:
        output: as it was given to the run.

    Raises, while iterating:
        FileNotFoundError: if there is no such output.
    """
    path = real_path(Path(output))
    yield from _read(results_path(path))
    if errors_path(path).exists():
        yield from _read(errors_path(path))


def _read(path: Path) -> Iterator[BulkResult]:
    with path.open("rb") as stream:
        for line in stream:
            if read_line(line):
                yield BulkResult.of(json.loads(line))
