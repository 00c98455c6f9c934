"""A request for a batch, and the rows of its input."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Annotated, Any, Literal

from redis import Redis

from omlx_gateway.access import own_salt, owner_field
from omlx_gateway.errors import api_error
from omlx_gateway.keys import ApiKey
from omlx_producer.bulk.plan import Seen, plan_rows
from omlx_producer.bulk.records import Record, read_records
from omlx_producer.bulk.row import BadRow, Row, place_of
from omlx_producer.bulk.shape import RowMaker, Shape
from omlx_producer.bulk.store import Store
from omlx_producer.client.models import read_models
from omlx_producer.wire import (
    CompletionWindow,
    InvalidRequest,
    Metadata,
    Remedy,
    RequestPart,
    seconds_of,
)

MAX_ROWS = 50_000
MAX_ERRORS = 100


class NewBatch(RequestPart):
    """The body of a request for a batch."""

    input_file_id: Annotated[str, Remedy("the id of a file")]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: CompletionWindow
    metadata: Metadata | None = None

    def fields(self, owner: str | None) -> dict[str, Any]:
        """What it adds to the hash of its batch."""
        fields = self.model_dump(exclude_none=True) | owner_field(owner)
        if self.metadata is not None:
            fields["metadata"] = json.dumps(self.metadata)
        return fields | {"expires_at": time.time() + seconds_of(self.completion_window)}


class WrongInput(Exception):
    """What is wrong with an input: entries of a batch's ``errors``."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(errors)
        self.errors = errors


def read_rows(
    connection: Redis, content: IO[bytes], new: NewBatch, key: ApiKey | None
) -> Iterator[Row]:
    """The rows of an input up to the first wrong one, checked as those of the command line are.

    Raises, while iterating:
        WrongInput: after the last row, with at most `MAX_ERRORS` wrong ones.
    """
    errors, count = list[dict[str, Any]](), 0
    shape = Shape(sampling={"completion_window": new.completion_window})
    content.seek(0)
    try:
        maker = RowMaker("jsonl", shape, read_models(connection))
        records = (_checked(each, new.endpoint) for each in read_records(content, "jsonl"))
        rows = (_salted(maker.make(record), key) for record in records)
        for row in itertools.islice(plan_rows(rows, Store(), Seen()), MAX_ROWS + 1):
            count += 1
            if len(errors) == MAX_ERRORS:
                continue
            if isinstance(row, BadRow):
                errors.append(batch_error(row.code, row.reason, row.line, row.field))
            elif key and not key.may_use(row.request.model):
                message = f"{place_of(row.line, row.custom_id)}: model: got "
                message += f"{row.request.model!r}; this API key may use "
                message += ", ".join(key.models or ())
                errors.append(batch_error("model_not_allowed", message, row.line, "model"))
            elif not errors:
                yield row
    except InvalidRequest as error:
        raise WrongInput([batch_error("invalid_request", api_error(error).message)]) from None
    if count > MAX_ROWS:
        message = f"the input has more than {MAX_ROWS} rows; split it"
        errors.insert(0, batch_error("too_many_rows", message))
    if not count:
        errors.append(batch_error("empty_file", "the input has no rows; give a line for each"))
    if errors:
        raise WrongInput(errors)


def _salted(row: Row | BadRow, key: ApiKey | None) -> Row | BadRow:
    """A row with the salt of the batch's owner."""
    if key is None or isinstance(row, BadRow):
        return row
    salt = own_salt(key.sha256, row.request.cache_salt)
    return replace(row, request=row.request.model_copy(update={"cache_salt": salt}))


def _checked(record: Record, endpoint: str) -> Record:
    """A record, which has a problem if its endpoint is not the batch's."""
    if not isinstance(record.value, dict):
        return record
    url = record.value.get("url")
    if url != endpoint:
        problem = f"url: got {url!a:.80}; give the endpoint of the batch, {endpoint}"
        return replace(record, value=None, problem=problem)
    if "body" not in record.value:
        return replace(record, value=None, problem="body: missing; give a JSON object")
    return record


def batch_error(
    code: str, message: str, line: int | None = None, field: str = ""
) -> dict[str, Any]:
    """An entry of a batch's ``errors``, in OpenAI's form."""
    return {"code": code, "message": message, "line": line, "param": field or None}
