"""Reads the request in a job's payload, which is not trusted.

RQ stores a zlib-compressed JSON list: function name, instance, positional and keyword arguments.
Anything else is refused with one sentence. Nothing in a payload is imported, called or unpickled.
"""

from __future__ import annotations

import zlib
from typing import Any, NoReturn

from omlx_producer.errors import shown
from omlx_producer.wire import JOB_FUNCTION, GenerationRequest, InvalidRequest
from omlx_producer.wire.json_limits import read_json
from omlx_worker.queue.claim import MAX_BODY_BYTES

_RQS_JSON = "enqueue with RQ's JSONSerializer"


def decode_request(data: bytes, model_alias: str) -> GenerationRequest:
    """The request of a claimed job, checked.

    Raises:
        InvalidRequest: with one sentence for the user.
    """
    match _read_call(_decompress(data)):
        case [function, _, _, _] if function != JOB_FUNCTION:
            raise InvalidRequest(
                None,
                f"the job calls {shown(function)}, which this worker does not run",
                f"enqueue {JOB_FUNCTION}",
            )
        case [_, None, [], {"request": fields, **others}] if not others:
            request = GenerationRequest.parse(fields)
        case _:
            raise InvalidRequest(
                None,
                "the job's payload is not a call with the keyword request alone, as RQ writes one",
            )
    if request.model != model_alias:
        raise InvalidRequest(
            "model", f"got {shown(request.model)}", f"this worker serves {model_alias!r}"
        )
    return request


def _decompress(data: bytes) -> bytes:
    if not data:
        raise InvalidRequest(
            None, "the job has no payload", "enqueue it through RQ or omlx_producer"
        )
    decompressor = zlib.decompressobj()
    try:
        body = decompressor.decompress(data, MAX_BODY_BYTES)
    except zlib.error:
        return data  # RQ reads uncompressed payloads too.
    if decompressor.unconsumed_tail:
        raise InvalidRequest(
            None,
            f"the job's payload unpacks to more than the {MAX_BODY_BYTES} bytes that are read",
        )
    return body


def _read_call(body: bytes) -> Any:
    if body.startswith(b"\x80"):
        raise InvalidRequest(
            None, "the job's payload is a pickle, which this worker never opens", _RQS_JSON
        )
    try:
        return read_json(body.decode(), _refuse_constant)
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest(None, "the job's payload is nested too deeply", "flatten it") from None
    except ValueError:
        raise InvalidRequest(None, "the job's payload is not JSON", _RQS_JSON) from None


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(None, f"the job's payload holds {name}, which is not JSON")
