"""The table of results, CSV or Parquet: a line for each choice, and one for each failed row.

The token counts are those of a row with all its choices, so only its first line has them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from omlx_producer.bulk.journal import replacing
from omlx_producer.bulk.records import import_pyarrow
from omlx_producer.completion import answer_text
from omlx_producer.json_schema import resolve

TOKEN_COLUMNS = ("prompt_tokens", "completion_tokens")
COLUMNS = ("custom_id", "text", "finish_reason", *TOKEN_COLUMNS, "error")
BODY = "response"
ANSWER = "answer."
ROW_GROUP = 512


def is_table(output: Path) -> bool:
    return output.suffix.lower() in {".csv", ".parquet"}


def properties_of(response_format: Mapping[str, Any] | None) -> list[str]:
    """The properties at the top of answers in this format, through a local ``$ref`` at the top."""
    named = (response_format or {}).get("json_schema") or {}
    schema = named.get("schema", {})
    tops, reference = [schema], schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        with contextlib.suppress(LookupError):
            tops.append(resolve(reference, schema))
    found: dict[str, Any] = {}
    for top in tops:
        properties = top.get("properties") if isinstance(top, dict) else None
        if isinstance(properties, dict):
            found |= properties
    return list(found)


def write_table(
    documents: Iterable[Mapping[str, Any]],
    output: Path,
    *,
    like: Path,
    with_body: bool,
    properties: Sequence[str] = (),
) -> None:
    """Write the table of output lines, results and errors. A result with an error failed after it.

    Args:
        like: a new table gets the permissions of this file.
        with_body: add the whole response body as JSON, in the column `BODY`.
        properties: of answers in JSON. Each gets a column, with the prefix `ANSWER` as long as
            another column has its name.

    Raises:
        InvalidRequest: if Parquet is asked for without pyarrow.
        OSError: if the file cannot be written.
    """
    columns = [*COLUMNS, BODY] if with_body else [*COLUMNS]
    named: dict[str, str] = {}
    for name in properties:
        column = name
        while column in columns:
            column = f"{ANSWER}{column}"
        columns.append(column)
        named[column] = name
    rows = (_in_utf8(row) for each in documents for row in _rows(each, with_body, named))
    write = _write_parquet if output.suffix.lower() == ".parquet" else _write_csv
    with replacing(output, like=like) as stream:
        write(rows, columns, stream)


def _rows(
    document: Mapping[str, Any], with_body: bool, named: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    row = {"custom_id": document["custom_id"]}
    once: dict[str, Any] = {}
    if error := document["error"]:
        once["error"] = f"{error['code']}: {error['message']}"
    if document["response"] is None:
        yield row | once
        return
    body = document["response"]["body"]
    once |= {name: body["usage"][name] for name in TOKEN_COLUMNS}
    if with_body:
        once[BODY] = json.dumps(body, ensure_ascii=False)
    for choice in body["choices"]:
        text = answer_text(choice)
        cells = {"text": text, "finish_reason": choice["finish_reason"], **_cells(text, named)}
        yield row | cells | once
        once = {}


def _in_utf8(row: dict[str, Any]) -> dict[str, Any]:
    """A row with lone surrogates, which UTF-8 lacks, escaped."""
    return {
        name: cell.encode(errors="backslashreplace").decode() if isinstance(cell, str) else cell
        for name, cell in row.items()
    }


def _cells(text: str, named: Mapping[str, str]) -> dict[str, str]:
    """The properties of an answer by column: texts as they are, other values as JSON."""
    try:
        answer = json.loads(text) if named else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return {}
    return {
        column: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for column, name in named.items()
        if (value := answer.get(name)) is not None
    }


def _write_csv(rows: Iterator[dict[str, Any]], columns: list[str], stream: IO[bytes]) -> None:
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    text.detach()


def _write_parquet(rows: Iterator[dict[str, Any]], columns: list[str], stream: IO[bytes]) -> None:
    arrow, parquet = import_pyarrow()
    types = {name: arrow.int64() if name in TOKEN_COLUMNS else arrow.string() for name in columns}
    schema = arrow.schema(list(types.items()))
    with parquet.ParquetWriter(stream, schema) as writer:
        while chunk := list(itertools.islice(rows, ROW_GROUP)):
            writer.write_table(arrow.Table.from_pylist(chunk, schema=schema))
