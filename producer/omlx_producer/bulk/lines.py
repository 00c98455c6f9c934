"""Output lines as OpenAI's Batch API writes them.

The ``id`` of a line ends in the digest of its row, so that the files alone say which version of
which row is done. The error of a row without a custom_id of its own has its ``line`` instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from omlx_producer.bulk.row import BadRow, RowResult, id_key, line_key

ID_PREFIX = "batch_req_"
LINE_BEGINNING = b'{"id": "' + ID_PREFIX.encode()


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
        digest = document["id"].removeprefix(ID_PREFIX)
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
    return WrittenLine(key, digest, error is None, by_line)
