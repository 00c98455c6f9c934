"""/v1/files: inputs of batches, in Redis, and what batches have written.

The files that a batch writes are read from its results, see `omlx_gateway.outputs`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import IO, Any

from python_multipart.multipart import parse_options_header
from redis import Redis
from redis.utils import str_if_bytes
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from omlx_gateway import contents
from omlx_gateway.access import is_own, owner_field, owner_of
from omlx_gateway.contents import on_disk
from omlx_gateway.errors import ApiError
from omlx_gateway.gateway import Gateway
from omlx_gateway.outputs import OutputFile
from omlx_gateway.pages import FILES_INDEX, index_entry, page_of
from omlx_producer.errors import InvalidRequest, UnknownJob
from omlx_producer.wire.keys import KEEP_SECONDS, file_content_key, file_key

PURPOSE = "batch"
MAX_NAME_CHARACTERS = 255
_PART_BYTES = 2**16
_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True)
class FileStore:
    """The files, by the records in Redis.

    Attributes:
        owner: of the files that are found and added, see `owner_of`; None for all.
    """

    connection: Redis
    owner: str | None = None

    def add(self, content: IO[bytes], filename: str) -> dict[str, Any]:
        """Store a new input; returns its record.

        If this fails, nothing is left of it, unless Redis is away. Then the content may be left,
        alone or with its record, but never a record alone.
        """
        file_id, now = f"file-{secrets.token_hex(12)}", time.time()
        entry = index_entry(self.owner, now, file_id)
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove, file_id, entry)
            size = contents.write(self.connection, file_id, content)
            record: dict[Any, Any] = {"filename": filename, "bytes": size, "purpose": PURPOSE}
            record |= {"created_at": f"{now:.6f}", **owner_field(self.owner)}
            with self.connection.pipeline() as pipe:
                record["expires_at"] = int(now) + KEEP_SECONDS
                pipe.hset(file_key(file_id), mapping=record)
                pipe.expire(file_key(file_id), KEEP_SECONDS)
                pipe.zadd(FILES_INDEX, {entry: 0})
                pipe.execute()
            undo.pop_all()
        return {"id": file_id, **record}

    def read(self, file_id: str) -> dict[str, str]:
        """The record of a file of any owner; empty if there is none."""
        if output := OutputFile.of(self.connection, file_id):
            with contextlib.suppress(UnknownJob):
                return output.record()
            return {}
        found: Any = self.connection.hgetall(file_key(file_id)) if _ID.fullmatch(file_id) else {}
        return {str_if_bytes(name): str_if_bytes(value) for name, value in found.items()}

    def find(self, file_id: str) -> dict[str, str]:
        """The record of a file of this owner.

        Raises:
            ApiError: 404.
        """
        record = self.read(file_id)
        if not record or not is_own(record, self.owner):
            raise ApiError(404, f"no file has the id {file_id!r:.80}; check the id", param="id")
        return record

    def open(self, file_id: str) -> IO[bytes]:
        """The bytes of an upload.

        Raises:
            ApiError: 404.
        """
        found = contents.read(self.connection, file_id)
        if found is None:
            raise ApiError(404, f"the content of {file_id} has expired")
        return found

    def delete(self, file_id: str) -> None:
        """Forget a file.

        Raises:
            ApiError: 404.
        """
        record = self.find(file_id)
        if output := OutputFile.of(self.connection, file_id):
            # Its entry goes with that of the batch.
            output.delete()
            return
        entry = index_entry(record.get("owner"), float(record["created_at"]), file_id)
        self._remove(file_id, entry)

    def _remove(self, file_id: str, entry: str) -> None:
        with self.connection.pipeline() as pipe:
            pipe.delete(file_key(file_id), file_content_key(file_id))
            pipe.zrem(FILES_INDEX, entry)
            pipe.execute()


def _document(file_id: str, record: dict[str, Any]) -> dict[str, Any]:
    """A file in OpenAI's form."""
    expires = record.get("expires_at")
    return {
        "id": file_id,
        "object": "file",
        "bytes": int(record["bytes"]),
        "created_at": int(float(record["created_at"])),
        "expires_at": int(expires) if expires else None,
        "filename": record["filename"],
        "purpose": record["purpose"],
        "status": "processed",
        "status_details": None,
    }


def _store(request: Request) -> FileStore:
    gateway = Gateway.of(request)
    return FileStore(gateway.blocking, owner_of(request))


async def create(request: Request) -> JSONResponse:
    with on_disk():
        content, filename = await _read_form(request)
    try:
        record = await run_in_threadpool(_store(request).add, content.file, filename)
    finally:
        await content.close()
    return JSONResponse(_document(record["id"], record))


async def _read_form(request: Request) -> tuple[UploadFile, str]:
    """The file of an upload, in a temporary file without a name.

    Raises:
        InvalidRequest: if a field is missing or wrong.
        ApiError: 413 if it is too long.
    """
    gateway = Gateway.of(request)
    most = gateway.limits.file_bytes
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "the body is not multipart/form-data; give the fields purpose and file")

    async def limited() -> AsyncGenerator[bytes]:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ApiError(413, f"the file is longer than {most} bytes; split it")
            yield part

    parser = MultiPartParser(request.headers, limited(), max_files=1, max_fields=8)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the body cannot be read: {error.message}") from None
    try:
        for name in form:
            if name not in ("file", "purpose"):
                raise InvalidRequest(name[:80], "unknown", "leave it out")
        purpose, content = form.get("purpose"), form.get("file")
        if purpose != PURPOSE:
            raise InvalidRequest("purpose", f"got {purpose!r:.80}", "give 'batch'")
        if not isinstance(content, UploadFile):
            raise InvalidRequest("file", "missing", "give a file of JSON lines")
    except InvalidRequest:
        await form.close()
        raise
    name = (content.filename or "").encode(errors="replace").decode()
    return content, name[:MAX_NAME_CHARACTERS]


def list_all(request: Request) -> JSONResponse:
    store, purpose = _store(request), request.query_params.get("purpose")

    def document(file_id: str) -> dict[str, Any] | None:
        record = store.read(file_id)
        if not record:
            return None
        return _document(file_id, record) if purpose in (None, record["purpose"]) else None

    return JSONResponse(page_of(store.connection, FILES_INDEX, request, document, most=10_000))


def retrieve(request: Request) -> JSONResponse:
    file_id = request.path_params["file_id"]
    return JSONResponse(_document(file_id, _store(request).find(file_id)))


def content(request: Request) -> Response:
    store, file_id = _store(request), request.path_params["file_id"]
    record = store.find(file_id)
    output = OutputFile.of(store.connection, file_id)
    parts = output.lines() if output else _parts(store.open(file_id))
    told = {"Content-Length": record["bytes"]}
    return StreamingResponse(parts, media_type="application/jsonl", headers=told)


def _parts(content: IO[bytes]) -> Iterator[bytes]:
    with content:
        yield from iter(lambda: content.read(_PART_BYTES), b"")


def delete(request: Request) -> JSONResponse:
    file_id = request.path_params["file_id"]
    _store(request).delete(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


routes = [
    Route("/v1/files", create, methods=["POST"]),
    Route("/v1/files", list_all),
    Route("/v1/files/{file_id}", retrieve),
    Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", content),
]
