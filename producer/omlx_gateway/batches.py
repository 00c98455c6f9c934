"""/v1/batches: OpenAI's batches, each a detached batch of the queue.

A batch has a record in Redis with a status. It is ``validating`` until a gateway has uploaded the
rows of its input, see `omlx_gateway.intake`; ``in_progress`` or ``cancelling`` until the workers
have ended its batch; then it has its files, and never changes again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import WatchError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from omlx_gateway.access import is_own, key_of, owner_field, owner_of
from omlx_gateway.errors import ApiError
from omlx_gateway.files import FILES_KEY, PURPOSE, FileStore, decoded, file_key, new_record
from omlx_gateway.gateway import Gateway
from omlx_gateway.outputs import is_error
from omlx_gateway.pages import page_of
from omlx_producer.bulk.batch import KEEP_SECONDS, Batch, BatchState
from omlx_producer.bulk.shape import CHAT_URL, COMPLETION_URL, RESPONSES_URL
from omlx_producer.errors import UnknownJob
from omlx_producer.wire import GenerationRequest

BATCHES_KEY = "omlx:http_batches"
"""The ids of batches by the time at which they were made."""
UNFINISHED_KEY = "omlx:http_batches:unfinished"
ENDPOINTS = (CHAT_URL, COMPLETION_URL, RESPONSES_URL)
_ID = re.compile(r"batch_[0-9a-f]{24}")
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")
MAX_METADATA, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
_TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


def record_key(batch_id: str) -> str:
    return f"omlx:http_batch:{batch_id}"


@dataclass(frozen=True)
class BatchRecords:
    """The records of batches in Redis.

    Attributes:
        owner: of the batches that are found, see `owner_of`; None for all.
    """

    connection: Redis
    owner: str | None = None

    def find(self, batch_id: str) -> dict[str, str]:
        """The record of a batch.

        Raises:
            ApiError: 404.
        """
        known = _ID.fullmatch(batch_id)
        found: Any = self.connection.hgetall(record_key(batch_id)) if known else {}
        record = decoded(found)
        if "created_at" not in record or not is_own(record, self.owner):
            raise ApiError(404, f"no batch has the id {batch_id!r:.80}; check the id", param="id")
        return record

    def add(self, batch_id: str, record: Mapping[Any, Any], now: float) -> bool:
        """Make a new record; returns False if there is one, which stays as it is."""
        key = record_key(batch_id)
        with self.connection.pipeline() as pipe:
            while True:
                try:
                    pipe.watch(key)  # type: ignore[no-untyped-call]
                    if pipe.exists(key):
                        return False
                    pipe.multi()
                    pipe.hset(key, mapping=dict(record))
                    pipe.zadd(BATCHES_KEY, {batch_id: now})
                    pipe.sadd(UNFINISHED_KEY, batch_id)
                    pipe.execute()
                except WatchError:
                    # Also if the connection has broken, with or without a record.
                    continue
                return True

    def move(
        self,
        batch_id: str,
        changes: Mapping[str, Any],
        *,
        files: Mapping[str, Mapping[Any, Any]] | None = None,
        over: bool = False,
        **expected: str,
    ) -> bool:
        """Change a record, if it still has these values; returns whether it had.

        Args:
            files: records of files to make with it.
            over: the record never changes again. It is kept for as long as the results.
            expected: values of fields; empty for a field that it lacks.
        """
        key = record_key(batch_id)
        with self.connection.pipeline() as pipe:
            try:
                pipe.watch(key)  # type: ignore[no-untyped-call]
                found = decoded(pipe.hgetall(key))
                if any(found.get(name, "") != value for name, value in expected.items()):
                    return False
                pipe.multi()
                pipe.hset(key, mapping={name: str(value) for name, value in changes.items()})
                for file_id, record in (files or {}).items():
                    pipe.hset(file_key(file_id), mapping=dict(record))
                    pipe.expire(file_key(file_id), KEEP_SECONDS)
                    pipe.zadd(FILES_KEY, {file_id: time.time()})
                if over:
                    pipe.srem(UNFINISHED_KEY, batch_id)
                    pipe.expire(key, KEEP_SECONDS)
                pipe.execute()
            except WatchError:
                return False
        return True

    def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """End a batch whose input is wrong."""
        changes = {"status": "failed", "failed_at": _now(), "errors": json.dumps(errors)}
        self.move(batch_id, changes, over=True, status="validating")

    def settle(self, batch_id: str) -> tuple[dict[str, str], BatchState | None]:
        """Bring a record up to what the workers have done; returns it, and its batch if open.

        Raises:
            ApiError: 404.
        """
        while True:
            record = self.find(batch_id)
            status = record["status"]
            if status == "validating" and time.time() > float(record["expires_at"]):
                ended = {"status": "expired", "expired_at": _now()}
                self.move(batch_id, ended, over=True, status=status)
                continue
            if status not in ("in_progress", "cancelling"):
                return record, None
            batch = Batch(self.connection, record["batch"]) if record.get("batch") else None
            if status == "cancelling":
                drop_upload(batch)
            try:
                state = batch.read() if batch is not None else None
            except UnknownJob:
                state = None
            if batch is None or state is None:
                self._end_without(batch_id, status)
            elif not state.over:
                if status == "cancelling" and state.state == "open":
                    batch.cancel()
                    continue
                return record, state
            else:
                self._finalize(batch_id, record, batch, state)

    def _end_without(self, batch_id: str, status: str) -> None:
        """End a batch that the queue does not have (any more)."""
        if status == "cancelling":
            changes: dict[str, Any] = {"status": "cancelled", "cancelled_at": _now()}
        else:
            message = "the batch was deleted from the queue, or has expired"
            error = {"code": "batch_deleted", "message": message, "line": None, "param": None}
            changes = {"status": "failed", "failed_at": _now(), "errors": json.dumps([error])}
        self.move(batch_id, changes, over=True, status=status)

    def _finalize(
        self, batch_id: str, record: Mapping[str, str], batch: Batch, state: BatchState
    ) -> None:
        """Make the files of a batch that is over."""
        ended, ended_at = (
            "completed" if state.state == "done" else state.state,
            int(state.ended_at or time.time()),
        )
        changes: dict[str, Any] = {
            "status": ended,
            "finalizing_at": ended_at,
            f"{ended}_at": ended_at,
            "total": state.rows,
            "completed": state.ok,
            "failed": state.failed,
        }
        sizes = {"output": 0, "error": 0}
        for line in batch.results(state.rows):
            sizes["error" if is_error(line) else "output"] += len(line)
        files = {}
        for kind, size in sizes.items():
            if size:
                # Another gateway makes the same ids.
                digest = hashlib.sha256(f"{batch_id} {kind}".encode()).hexdigest()
                changes[f"{kind}_file_id"] = file_id = f"file-{digest[:24]}"
                files[file_id] = {
                    **new_record(
                        f"{batch_id}_{kind}.jsonl", size, "batch_output", record.get("owner")
                    ),
                    "batch": batch.id,
                    "kind": kind,
                    "expires_at": ended_at + KEEP_SECONDS,
                }
        self.move(batch_id, changes, files=files, over=True, status=record["status"])


def drop_upload(batch: Batch | None) -> None:
    """Delete a batch that is not uploaded yet, so that its upload cannot open it."""
    if batch is None:
        return
    with batch.connection.pipeline() as pipe:
        while True:
            try:
                pipe.watch(batch.key)  # type: ignore[no-untyped-call]
                found = decoded(pipe.hgetall(batch.key))
                if found.get("state") != "uploading":
                    return
                pipe.multi()
                queues = found.get("queues", "").split()
                pipe.delete(batch.key, batch.results_key, *map(batch.waiting_key, queues))
                pipe.execute()
            except WatchError:
                continue
            return


def _now() -> int:
    return int(time.time())


def _document(batch_id: str, record: dict[str, str], state: BatchState | None) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    status = record["status"]
    counts = {name: int(record.get(name, 0)) for name in ("total", "completed", "failed")}
    if state is not None:
        counts = {"total": state.rows, "completed": state.ok, "failed": state.failed}
        if state.state == "cancelling":
            status = "cancelling"
    errors = json.loads(record["errors"]) if "errors" in record else None
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": record["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record["input_file_id"],
        "completion_window": record["completion_window"],
        "status": status,
        "output_file_id": record.get("output_file_id"),
        "error_file_id": record.get("error_file_id"),
        **{name: int(record[name]) if name in record else None for name in _TIMES},
        "request_counts": counts,
        "metadata": json.loads(record["metadata"]) if "metadata" in record else None,
    }


async def create(request: Request) -> JSONResponse:
    async with Gateway.of(request).body_of(request) as body:
        return JSONResponse(await run_in_threadpool(_create, request, body))


def _create(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    gateway, key, owner = Gateway.of(request), key_of(request), owner_of(request)
    for name in body:
        if name not in _FIELDS:
            raise ApiError(400, f"{name!a:.80}: unknown; leave it out", param=name[:80])
    endpoint, window = body.get("endpoint"), body.get("completion_window")
    if endpoint not in ENDPOINTS:
        raise ApiError(
            400, f"endpoint: got {endpoint!r:.80}; give {' or '.join(ENDPOINTS)}", param="endpoint"
        )
    if not isinstance(window, str):
        raise ApiError(
            400, f"completion_window: got {window!r:.80}; give '24h'", param="completion_window"
        )
    # Its errors name the field.
    asked = GenerationRequest.parse({"model": "x", "prompt": "x", "completion_window": window})
    metadata = _checked_metadata(body.get("metadata"))
    file_id = body.get("input_file_id")
    if not isinstance(file_id, str):
        raise ApiError(
            400,
            f"input_file_id: got {file_id!r:.80}; give the id of a file",
            param="input_file_id",
        )
    try:
        file = FileStore(gateway.blocking, gateway.contents, owner).find(file_id)
    except ApiError as error:
        raise ApiError(400, f"input_file_id: {error.message}", param="input_file_id") from None
    if file["purpose"] != PURPOSE:
        raise ApiError(
            400,
            f"input_file_id: {file_id} has the purpose {file['purpose']}; give a file with 'batch'",
            param="input_file_id",
        )
    batch_id, now = _new_id(request), time.time()
    record: dict[Any, Any] = {
        "status": "validating",
        "endpoint": str(endpoint),
        "input_file_id": file_id,
        "completion_window": window,
        "created_at": str(int(now)),
        "expires_at": str(math.ceil(now + (asked.window_seconds or 0))),
    }
    if metadata is not None:
        record["metadata"] = json.dumps(metadata)
    record |= owner_field(owner)
    if key is not None and key.models is not None:
        record["models"] = " ".join(key.models)
    records = BatchRecords(gateway.blocking, owner)
    if not records.add(batch_id, record, now):
        found, state = records.settle(batch_id)
        if any(found.get(name) != record.get(name) for name in _FIELDS):
            raise ApiError(400, "Idempotency-Key: was given with another request; give a new key")
        return _document(batch_id, found, state)
    return _document(batch_id, record, None)


def _new_id(request: Request) -> str:
    """A batch's id, the same for the same ``Idempotency-Key`` of an API key."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return f"batch_{secrets.token_hex(12)}"
    digest = hashlib.sha256(f"{owner_of(request)}:{given}".encode()).hexdigest()
    return f"batch_{digest[:24]}"


def _checked_metadata(given: Any) -> dict[str, str] | None:
    """The metadata of a new batch.

    Raises:
        ApiError: 400.
    """
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MAX_METADATA:
        raise ApiError(
            400,
            f"metadata: got {given!r:.60}; give an object of at most {MAX_METADATA} texts",
            param="metadata",
        )
    for name, value in given.items():
        wrong = len(name) > MAX_KEY_CHARACTERS or not isinstance(value, str)
        if wrong or len(value) > MAX_VALUE_CHARACTERS or not _is_text(name + value):
            raise ApiError(
                400,
                f"metadata: got {value!a:.60} for {name!a:.60}; give texts of at most "
                f"{MAX_VALUE_CHARACTERS} characters with names of at most {MAX_KEY_CHARACTERS}",
                param="metadata",
            )
    return given


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def retrieve(request: Request) -> JSONResponse:
    batch_id = request.path_params["batch_id"]
    records = BatchRecords(Gateway.of(request).blocking, owner_of(request))
    return JSONResponse(_document(batch_id, *records.settle(batch_id)))


def cancel(request: Request) -> JSONResponse:
    batch_id = request.path_params["batch_id"]
    records = BatchRecords(Gateway.of(request).blocking, owner_of(request))
    while True:
        record, _ = records.settle(batch_id)
        status = record["status"]
        if status in ("validating", "in_progress"):
            changes = {"status": "cancelling", "cancelling_at": _now()}
            if not records.move(batch_id, changes, status=status):
                continue
        elif status not in ("cancelling", "cancelled"):
            raise ApiError(409, f"{batch_id} is {status}; only a batch that runs can be cancelled")
        return JSONResponse(_document(batch_id, *records.settle(batch_id)))


def list_all(request: Request) -> JSONResponse:
    # Of all owners: what is not found is taken for expired.
    records, owner = BatchRecords(Gateway.of(request).blocking), owner_of(request)

    def document(batch_id: str) -> dict[str, Any] | None:
        try:
            record, state = records.settle(batch_id)
        except ApiError:
            return None
        return _document(batch_id, record, state) if is_own(record, owner) else {}

    page = page_of(records.connection, BATCHES_KEY, request, document, most=100, usual=20)
    return JSONResponse(page)


routes = [
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches", list_all),
    Route("/v1/batches/{batch_id}", retrieve),
    Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
]
