"""A request for a batch, and the rows of its input."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import IO, Annotated, Any, Literal

from redis import Redis

from omlx_gateway.access import own_salt, owner_field
from omlx_producer.bulk.plan import Seen, plan_rows
from omlx_producer.bulk.records import Record, read_records
from omlx_producer.bulk.row import BadRow, Row, place_of
from omlx_producer.bulk.shape import RowMaker, Shape
from omlx_producer.bulk.store import Store
from omlx_producer.client.models import read_models
from omlx_producer.wire import GenerationRequest, Metadata, Remedy, RequestPart

MAX_ROWS = 50_000
MAX_ERRORS = 100


class NewBatch(RequestPart):
    """The body of a request for a batch."""

    input_file_id: Annotated[str, Remedy("the id of a file")]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Annotated[str, Remedy("'24h'")]
    metadata: Metadata | None = None

    def fields(self, owner: str | None) -> dict[str, Any]:
        """What it adds to the hash of its batch.

        Raises:
            InvalidRequest: if the completion window is none.
        """
        asked = {"model": "x", "prompt": "x", "completion_window": self.completion_window}
        seconds = GenerationRequest.parse(asked).window_seconds or 0
        fields = self.model_dump(exclude_none=True) | owner_field(owner)
        if self.metadata is not None:
            fields["metadata"] = json.dumps(self.metadata)
        return fields | {"expires_at": time.time() + seconds}


class BatchInput:
    """The rows of an input, checked as those of the command line are.

    Args:
        window: the completion window of rows without one.
        endpoint: of all rows.
        owner: of the batch, see `owner_of`.

    Raises:
        InvalidRequest: if no worker has announced a model.
    """

    def __init__(
        self, connection: Redis, content: IO[bytes], window: str, endpoint: str, owner: str | None
    ) -> None:
        shape = Shape(sampling={"completion_window": window})
        self._maker = RowMaker("jsonl", shape, read_models(connection))
        self._content = content
        self._endpoint = endpoint
        self._owner = owner

    @contextlib.contextmanager
    def rows(self) -> Iterator[Iterator[Row | BadRow]]:
        """Its rows, in order."""
        self._content.seek(0)
        with contextlib.closing(Store()) as store:
            records = map(self._checked, read_records(self._content, "jsonl"))
            yield plan_rows(map(self._made, records), store, Seen())

    def errors(self, models: Collection[str] | None) -> list[dict[str, Any]]:
        """What is wrong with it, in OpenAI's form; at most `MAX_ERRORS` rows.

        Args:
            models: that its rows may use; None for all.
        """
        errors, count = list[dict[str, Any]](), 0
        with self.rows() as rows:
            for row in itertools.islice(rows, MAX_ROWS + 1):
                count += 1
                if len(errors) == MAX_ERRORS:
                    continue
                if isinstance(row, BadRow):
                    errors.append(batch_error(row.code, row.reason, row.line, row.field))
                elif models is not None and row.request.model not in models:
                    message = f"{place_of(row.line, row.custom_id)}: model: got "
                    message += f"{row.request.model!r}; this API key may use "
                    message += ", ".join(models)
                    errors.append(batch_error("model_not_allowed", message, row.line, "model"))
        if count > MAX_ROWS:
            message = f"the input has more than {MAX_ROWS} rows; split it"
            errors.insert(0, batch_error("too_many_rows", message))
        if not count:
            errors.append(batch_error("empty_file", "the input has no rows; give a line for each"))
        return errors

    def _made(self, record: Record) -> Row | BadRow:
        """The row of a record, with the salt of the batch's owner."""
        row = self._maker.make(record)
        if isinstance(row, BadRow):
            return row
        salt = own_salt(self._owner, row.request.cache_salt)
        return replace(row, request=row.request.model_copy(update={"cache_salt": salt}))

    def _checked(self, record: Record) -> Record:
        """A record, which has a problem if its endpoint is not the batch's."""
        if not isinstance(record.value, dict):
            return record
        url = record.value.get("url")
        if url != self._endpoint:
            problem = f"url: got {url!a:.80}; give the endpoint of the batch, {self._endpoint}"
            return replace(record, value=None, problem=problem)
        if "body" not in record.value:
            return replace(record, value=None, problem="body: missing; give a JSON object")
        return record


def batch_error(
    code: str, message: str, line: int | None = None, field: str = ""
) -> dict[str, Any]:
    """An entry of a batch's ``errors``, in OpenAI's form."""
    return {"code": code, "message": message, "line": line, "param": field or None}
