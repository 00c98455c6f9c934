"""Results of rows, as a run writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omlx_producer.bulk.output import Output
from omlx_producer.bulk.row import BadRow, Row, RowResult, digest_of
from omlx_producer.bulk.store import Store
from omlx_producer.wire import GenerationRequest


def body(text: str = "text", ends: Sequence[str] = ("stop",)) -> dict[str, Any]:
    """A response with a choice for each end."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": index, "text": text, "finish_reason": end, "logprobs": None}
            for index, end in enumerate(ends)
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }


def row(custom_id: str, line: int = 1, prompt: str = "p") -> Row:
    request = GenerationRequest(model="m", prompt=prompt)
    return Row(custom_id, line, request, digest_of(custom_id, request.to_wire()))


def ok(
    custom_id: str, line: int = 1, prompt: str = "p", ends: Sequence[str] = ("stop",)
) -> RowResult:
    response = body(f"text of {custom_id}", ends)
    return RowResult(row(custom_id, line, prompt), "bulk-1-1", body=response)


def failed(custom_id: str, line: int = 1) -> RowResult:
    return RowResult(row(custom_id, line), "bulk-1-1", code="failed", reason="out of memory")


def bad(line: int, custom_id: str | None = None) -> RowResult:
    row_ = BadRow(line, custom_id, "unparsable", f"line {line}: not JSON", f"{line:024x}", False)
    return RowResult(row_, "", code=row_.code, reason=row_.reason)


def write(path: Path, *results: RowResult, finish: bool = False, **how: Any) -> Store:
    """What a command does; returns the store as the next one finds it."""
    with Output.open(path) as output:
        for result in results:
            assert isinstance(result.row, Row | BadRow)
            output.store.see(result.row)
        output.commit(results)
        if finish:
            output.finish(**{"ordered": False} | how)
    return Store(path)
