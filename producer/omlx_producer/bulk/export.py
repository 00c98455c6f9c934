"""Results as a table: CSV or Parquet, one row for each result, made from the JSONL file."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omlx_producer.bulk.journal import replacing
from omlx_producer.errors import InvalidRequest

COLUMNS = (
    "custom_id",
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "model",
    "response",
)
CHUNK = 512


def export(results: Path, output: Path) -> None:
    """Write the table of a file of results; ``text`` is the first choice's, ``response`` all.

    Raises:
        InvalidRequest: if Parquet is asked for without pyarrow.
    """
    if output.suffix.lower() == ".parquet":
        _write_parquet(results, output)
    else:
        _write_csv(results, output)


def require_exporter(output: Path) -> None:
    """Fail before a run and not after it.

    Raises:
        InvalidRequest: if the output's format needs what is not installed.
    """
    if output.suffix.lower() == ".parquet":
        _pyarrow()


def _rows(results: Path) -> Iterator[dict[str, Any]]:
    with results.open("rb") as stream:
        for line in stream:
            document = json.loads(line)
            body = document["response"]["body"]
            choice = body["choices"][0]
            yield {
                "custom_id": document["custom_id"],
                "text": choice["text"] if "text" in choice else choice["message"]["content"],
                "finish_reason": choice["finish_reason"],
                "prompt_tokens": body["usage"]["prompt_tokens"],
                "completion_tokens": body["usage"]["completion_tokens"],
                "model": body["model"],
                "response": json.dumps(body, ensure_ascii=False),
            }


def _write_csv(results: Path, output: Path) -> None:
    with replacing(output) as stream:
        text = io.TextIOWrapper(stream, "utf-8", newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(_rows(results))
        text.detach()


def _write_parquet(results: Path, output: Path) -> None:
    arrow, parquet = _pyarrow()
    types = {"prompt_tokens": arrow.int64(), "completion_tokens": arrow.int64()}
    schema = arrow.schema([(name, types.get(name, arrow.string())) for name in COLUMNS])
    rows = _rows(results)
    with replacing(output) as stream, parquet.ParquetWriter(stream, schema) as writer:
        while chunk := list(itertools.islice(rows, CHUNK)):
            writer.write_table(arrow.Table.from_pylist(chunk, schema=schema))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InvalidRequest(
            "Parquet needs pyarrow, which is not installed; pip install 'omlx-queue[parquet]'"
        ) from None
    return arrow, parquet
