"""/v1/batches: OpenAI's batches, each a detached batch of the queue.

A batch is its hash in the queue, which has fields of OpenAI's form beside the queue's own. A
request for one checks its input and uploads the rows before it is answered. Its output and error
file are made of its results, see `omlx_gateway.outputs`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import time
from typing import IO, Any

from redis import Redis
from redis.utils import str_if_bytes
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from omlx_gateway.access import is_own, key_of, owner_of
from omlx_gateway.batch_input import NewBatch, WrongInput, batch_error, read_rows
from omlx_gateway.errors import RETRY_SECONDS, ApiError
from omlx_gateway.files import PURPOSE, FileStore
from omlx_gateway.gateway import Gateway
from omlx_gateway.outputs import OutputFile, output_ids
from omlx_gateway.pages import BATCHES_INDEX, FILES_INDEX, forget_gone, ids_of, index_entry, page_of
from omlx_producer.bulk.batch import Batch, BatchState
from omlx_producer.errors import JobCancelled, MalformedResult
from omlx_producer.wire.keys import file_key

_ID = re.compile(r"batch_[0-9a-f]{12}")
_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)


def find(connection: Redis, batch_id: str, owner: str | None) -> tuple[Batch, dict[str, str]]:
    """A batch, and its hash.

    Raises:
        ApiError: 404.
    """
    batch = Batch(connection, batch_id)
    found = batch.fields() if _ID.fullmatch(batch_id) else {}
    if "input_file_id" not in found or not is_own(found, owner):
        raise ApiError(404, f"no batch has the id {batch_id!r:.80}; check the id", param="id")
    return batch, found


def _document(batch: Batch, found: dict[str, str]) -> dict[str, Any]:
    """A batch in OpenAI's form; one that cannot be read has failed."""
    try:
        return _read(batch, found)
    except (KeyError, ValueError, MalformedResult) as error:
        errors = [batch_error("broken", f"its record in Redis cannot be read: {error}")]
        return {
            "id": f"batch_{batch.run}",
            "object": "batch",
            "status": "failed",
            "errors": {"object": "list", "data": errors},
        }


def _read(batch: Batch, found: dict[str, str]) -> dict[str, Any]:
    output, error = output_ids(batch.run)
    state = BatchState.of(batch.id, found)
    status = state.status
    times = dict[str, int | None].fromkeys(_TIMES)
    if status not in ("validating", "failed"):
        times["in_progress_at"] = int(state.created_at)
    if "cancelling_at" in found:
        times["cancelling_at"] = int(float(found["cancelling_at"]))
    if state.ended_at is not None:
        times[f"{status}_at"] = times["finalizing_at"] = int(state.ended_at)
    errors = json.loads(found.get("errors", "[]"))
    return {
        "id": f"batch_{batch.run}",
        "object": "batch",
        "endpoint": found["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": found["input_file_id"],
        "completion_window": found["completion_window"],
        "status": status,
        "output_file_id": output if state.over and state.ok else None,
        "error_file_id": error if state.over and state.errors else None,
        "created_at": int(state.created_at),
        "expires_at": int(float(found["expires_at"])),
        **times,
        "request_counts": {
            "total": state.rows,
            "completed": state.ok,
            "failed": state.failed,
        },
        "metadata": json.loads(found["metadata"]) if "metadata" in found else None,
    }


async def create(request: Request) -> JSONResponse:
    gateway = Gateway.of(request)
    async with gateway.body_of(request) as body, gateway.uploads:
        return JSONResponse(await run_in_threadpool(_create, request, body))


def _create(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    gateway, key, owner = Gateway.of(request), key_of(request), owner_of(request)
    connection, new = gateway.blocking, NewBatch.parse(body)
    batch = _batch_of(connection, owner, request.headers.get("idempotency-key"))
    fields = new.fields(owner)
    state = connection.hget(batch.key, "state")
    if state and not _was_cut_off(batch, str_if_bytes(state)):
        return _known(batch, fields, owner)
    store = FileStore(connection, owner)
    known = list(ids_of(connection, BATCHES_INDEX, owner))
    with _open_input(store, new.input_file_id) as content:
        rows = sum(not line.isspace() for line in content)
        begun = batch.begin(fields | {"left": rows})
        if not begun:
            return _known(batch, fields, owner)
        batch_id, now = f"batch_{batch.run}", time.time()
        # A killed upload that is replaced has its entries already.
        if batch_id not in known:
            with connection.pipeline() as pipe:
                pipe.zadd(BATCHES_INDEX, {index_entry(owner, now, batch_id): 0})
                for output in output_ids(batch.run):
                    pipe.zadd(FILES_INDEX, {index_entry(owner, now, output): 0})
                pipe.execute()
        try:
            with contextlib.suppress(JobCancelled):
                batch.upload(read_rows(connection, content, new, key), begun)
        except WrongInput as error:
            batch.fail(begun, json.dumps(error.errors))
    return _document(*find(connection, batch_id, owner))


def _was_cut_off(batch: Batch, state: str) -> bool:
    """Whether the upload of a batch was killed."""
    return state == "uploading" and not batch.is_kept()


def _open_input(store: FileStore, file_id: str) -> IO[bytes]:
    """The content of an input.

    Raises:
        ApiError: 400.
    """
    try:
        file = store.find(file_id)
        if file["purpose"] == PURPOSE:
            return store.open(file_id)
        problem = f"{file_id} has the purpose {file['purpose']}; give a file with 'batch'"
    except ApiError as error:
        problem = error.message
    raise ApiError(400, f"input_file_id: {problem}", param="input_file_id")


def _batch_of(connection: Redis, owner: str | None, key: str | None) -> Batch:
    """A new batch; the same one for the same ``Idempotency-Key`` of an owner."""
    given = secrets.token_hex() if key is None else key
    digest = hashlib.sha256(f"{owner}:{given}".encode()).hexdigest()
    return Batch.of_run(connection, digest[:12])


def _known(batch: Batch, fields: dict[str, Any], owner: str | None) -> dict[str, Any]:
    """The batch that an earlier request with the same ``Idempotency-Key`` has made.

    Raises:
        ApiError: 400 if that was another request, 409 while it uploads its rows.
    """
    _, found = find(batch.connection, f"batch_{batch.run}", owner)
    if any(found.get(name) != fields.get(name) for name in NewBatch.model_fields):
        raise ApiError(400, "Idempotency-Key: was given with another request; give a new key")
    if found["state"] == "uploading":
        raise ApiError(
            409,
            "Idempotency-Key: another request with it uploads the batch; "
            f"try again in {RETRY_SECONDS} s",
            code="batch_is_uploaded",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    return _document(batch, found)


def retrieve(request: Request) -> JSONResponse:
    connection, batch_id = Gateway.of(request).blocking, request.path_params["batch_id"]
    return JSONResponse(_document(*find(connection, batch_id, owner_of(request))))


def cancel(request: Request) -> JSONResponse:
    connection, batch_id = Gateway.of(request).blocking, request.path_params["batch_id"]
    batch, _ = find(connection, batch_id, owner_of(request))
    cancelled = batch.cancel()
    document = _document(*find(connection, batch_id, owner_of(request)))
    if not cancelled and document["status"] != "cancelled":
        status = document["status"]
        raise ApiError(409, f"{batch_id} is {status}; only a batch that runs can be cancelled")
    return JSONResponse(document)


def list_all(request: Request) -> JSONResponse:
    connection, owner = Gateway.of(request).blocking, owner_of(request)

    def document(batch_id: str) -> dict[str, Any] | None:
        with contextlib.suppress(ApiError):
            return _document(*find(connection, batch_id, owner))
        return None

    page = page_of(connection, BATCHES_INDEX, request, document, most=100, usual=20)
    return JSONResponse(page)


def shrink_indexes(connection: Redis) -> None:
    """Forget the files and batches that have expired or were deleted."""

    def record_key(file_id: str) -> str:
        output = OutputFile.of(connection, file_id)
        return output.batch.key if output else file_key(file_id)

    forget_gone(connection, FILES_INDEX, record_key)
    forget_gone(connection, BATCHES_INDEX, lambda batch_id: Batch(connection, batch_id).key)


routes = [
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches", list_all),
    Route("/v1/batches/{batch_id}", retrieve),
    Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
]
