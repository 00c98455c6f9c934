"""Output lines as OpenAI's Batch API writes them.

The ``id`` of a line ends in the digest of its row, so that the files alone say which version of
which row is done. The error of a row without a custom_id of its own has its ``line`` instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from omlx_producer.bulk.row import DIGEST_CHARACTERS, BadRow, RowResult, id_key, line_key

ID_PREFIX = "batch_req_"
# OpenAI's own ids begin alike; what follows in them is longer or shorter, or not hexadecimal.
_ID = re.compile(f"{ID_PREFIX}([0-9a-f]{{{DIGEST_CHARACTERS}}})")
_BEGINNING = re.compile(f'{{"id": "{_ID.pattern}"'.encode())
_ANY_BEGINNING = f'{{"id": "{ID_PREFIX}{"0" * DIGEST_CHARACTERS}"'.encode()


@dataclass(frozen=True, slots=True)
class WrittenLine:
    """What an output line says about its row."""

    key: str
    digest: str
    ok: bool
    by_line: bool


def write_line(result: RowResult) -> bytes:
    """The line of a result, with its line end."""
    row = result.row
    document: dict[str, Any] = {
        "id": ID_PREFIX + row.digest,
        "custom_id": row.custom_id,
        "response": None,
        "error": None,
    }
    if result.ok:
        document["response"] = {
            "status_code": 200,
            "request_id": result.job_id,
            "body": result.body,
        }
    else:
        error: dict[str, Any] = {"code": result.code, "message": result.reason}
        if isinstance(row, BadRow) and not row.own_id:
            error["line"] = row.line
        document["error"] = error
    return json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def read_line(line: bytes) -> WrittenLine | None:
    """Read a line back; None if it is none of ours."""
    try:
        document = json.loads(line)
        line_id = _ID.fullmatch(document["id"])
        if line_id is None:
            return None
        custom_id, error = document["custom_id"], document["error"]
        by_line = error is not None and "line" in error
        if by_line:
            key = line_key(int(error["line"]))
        elif isinstance(custom_id, str):
            key = id_key(custom_id)
        else:
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return WrittenLine(key, line_id[1], error is None, by_line)


def may_be_ours(line: bytes) -> bool:
    """Whether a line, which may be torn even before its beginning is whole, is one of ours."""
    return _BEGINNING.match(line + _ANY_BEGINNING[len(line) :]) is not None
