"""Decodes a claimed job's payload without trusting it.

RQ stores a zlib-compressed JSON list: function name, instance, positional and keyword arguments.
Anything else is refused with one sentence. Nothing in a payload is imported, called or unpickled.
"""

from __future__ import annotations

import ctypes
import gc
import json
import zlib
from typing import Any, NoReturn

from omlx_producer.errors import shown
from omlx_producer.wire import JOB_FUNCTION, GenerationRequest, InvalidRequest
from omlx_producer.wire.request_part import MAX_LEVELS
from omlx_worker.queue.claim import MAX_BODY_BYTES

MAX_VALUES = 100_000
_DEEP = "request: nested too deeply; flatten it"
TOO_LONG = f"the job's payload is {{}} bytes long; at most {MAX_BODY_BYTES} are read"


def decode_request(data: bytes, model_alias: str) -> GenerationRequest:
    """Read and validate the request of a claimed job.

    Raises:
        InvalidRequest: with one sentence for the user.
    """
    function, instance, args, kwargs = _decode_call(_decompress(data))
    if function != JOB_FUNCTION:
        raise InvalidRequest(
            f"the job calls {shown(function)}, which this worker does not run; "
            f"enqueue {JOB_FUNCTION}"
        )
    if instance is not None or args != []:
        raise InvalidRequest("the job has positional arguments; give the keyword request only")
    if not isinstance(kwargs, dict) or set(kwargs) != {"request"}:
        raise InvalidRequest("the job's only keyword argument must be request")
    _require_few_values(kwargs["request"])
    try:
        request = GenerationRequest.parse(kwargs["request"])
    except RecursionError:
        raise InvalidRequest(_DEEP) from None
    if request.model != model_alias:
        raise InvalidRequest(
            f"model: got {shown(request.model)}; this worker serves {model_alias!r}"
        )
    return request


def release_memory() -> None:
    """Return freed memory to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _decompress(data: bytes) -> bytes:
    if not data:
        raise InvalidRequest("the job has no payload; enqueue it through RQ or omlx_producer")
    decompressor = zlib.decompressobj()
    try:
        body = decompressor.decompress(data, MAX_BODY_BYTES)
    except zlib.error:
        body = data  # RQ reads uncompressed payloads too.
    else:
        if decompressor.unconsumed_tail:
            raise InvalidRequest(
                f"the job's payload unpacks to more than the {MAX_BODY_BYTES} bytes that are read"
            )
    return body


def _decode_call(body: bytes) -> tuple[Any, Any, Any, Any]:
    if body.startswith(b"\x80"):
        raise InvalidRequest(
            "the job's payload is a pickle, which this worker never opens; "
            "enqueue with RQ's JSONSerializer"
        )
    # Parsing millions of values triggers the collector again and again, which would stall every
    # thread for seconds.
    gc.disable()
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
    except InvalidRequest:
        raise
    except RecursionError:
        raise InvalidRequest("the job's payload is nested too deeply; flatten it") from None
    except ValueError:
        raise InvalidRequest(
            "the job's payload is not JSON; enqueue with RQ's JSONSerializer"
        ) from None
    finally:
        gc.enable()
    if not isinstance(call, list) or len(call) != 4:
        raise InvalidRequest("the job's payload is not a function call as RQ writes one")
    return (call[0], call[1], call[2], call[3])


def _require_few_values(request: Any) -> None:
    """Refuse requests of very many values or levels.

    Validation makes an error of each wrong value and names all levels above it. A prompt of token
    ids is not counted; its validation ends at the first error.
    """
    left = MAX_VALUES
    waiting = [(request, 0)]
    while waiting:
        value, level = waiting.pop()
        # The innermost may be a number or a text.
        if level > MAX_LEVELS + 1:
            raise InvalidRequest(_DEEP)
        if isinstance(value, dict):
            found: list[Any] = [item for key, item in value.items() if key != "prompt"]
        else:
            found = value if isinstance(value, list) else []
        left -= len(found)
        if left < 0:
            raise InvalidRequest(
                f"request: holds more than {MAX_VALUES} values beside its prompt; shorten it"
            )
        waiting += [(item, level + 1) for item in found]


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the job's payload holds {name}, which is not JSON")
