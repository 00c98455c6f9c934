"""How long a result may be, and what of that is known before it has a text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from omlx_producer.wire import GenerationRequest, InvalidRequest
from omlx_worker.engine.rows.request import RowRequest

MAX_RESULT_BYTES = 32 * 2**20
"""Of a result as JSON. A worker takes about ten times as much memory to make one."""

SCORE_BYTES = 100
"""Of a token with its log-probability, about, in each of the forms."""


def too_long(size: int) -> str:
    """A clause that says how long a result of ``size`` bytes is, and how long it may be."""
    return f"come to {size / 2**20:.0f} MiB; a result has at most {MAX_RESULT_BYTES // 2**20} MiB"


def require_short_vectors(count: int, size: int) -> None:
    """Refuse vectors that make a result too long.

    Args:
        size: numbers of each, of 4 bytes, which are written as base64.

    Raises:
        InvalidRequest: with the remedy.
    """
    if (total := count * size * 16 // 3) > MAX_RESULT_BYTES:
        what = f"{count} vectors of {size} numbers {too_long(total)}"
        raise InvalidRequest("input", what, "give fewer texts, or fewer dimensions")


def require_short(request: GenerationRequest, rows: Sequence[RowRequest]) -> None:
    """Refuse log-probabilities and repeated prompts that make a result too long.

    Args:
        rows: those of the request.

    Raises:
        InvalidRequest: with the largest part of the result.
    """
    first, n = rows[0], len(rows)
    prompt, most, top = len(first.prompt), first.max_tokens, first.sampling.top_logprobs
    parts = [
        (
            n * len(json.dumps(first.echo or "")),
            "echo",
            f"{n} copies of the prompt",
            "give a smaller n",
        )
    ]
    if top is not None:
        parts.append(
            (
                n * most * (1 + top) * SCORE_BYTES,
                "logprobs",
                f"{top} alternatives for {n} x {most} tokens",
                "give a smaller number of them, a smaller n or a lower max_completion_tokens",
            )
        )
    if (scored := first.prompt_logprobs) is not None:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        parts.append(
            (
                prompt * (1 + scored) * SCORE_BYTES,
                field,
                f"{scored} alternatives for the {prompt} tokens of the prompt",
                "give a smaller number or a shorter prompt",
            )
        )
    if (size := sum(part for part, *_ in parts)) > MAX_RESULT_BYTES:
        _, field, what, remedy = max(parts)
        raise InvalidRequest(field, f"{what} {too_long(size)}", remedy)
