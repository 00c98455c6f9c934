"""The function named by every job on the wire."""

from __future__ import annotations

from typing import Any, NoReturn


def generate(request: Any = None) -> NoReturn:  # noqa: ARG001 (what producers pass)
    """What a stock RQ worker calls. Only an omlx-worker can serve such a job."""
    raise RuntimeError(
        "this job needs an omlx-worker, which a stock RQ worker is not; "
        "start one with: omlx-worker run --model MODEL"
    )
