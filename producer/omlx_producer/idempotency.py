"""Submitting twice what is meant once: the second submission finds the first one's job.

The id of such a job is made from its key, so the job itself is what is remembered: for as long as
it waits or runs and its result is kept, and no longer. Nothing else is stored that could outlive
it, and a job that was deleted makes room for a new one.
"""

from __future__ import annotations

import hashlib
import json

from omlx_producer.errors import InvalidRequest
from omlx_producer.request import GenerationRequest

LONGEST_KEY = 255


def job_id_of(key: str) -> str:
    """The id of the job with an idempotency key.

    Raises:
        InvalidRequest: if the key is empty or too long.
    """
    if not 1 <= len(key) <= LONGEST_KEY:
        raise InvalidRequest(f"idempotency_key: got {len(key)} characters; give 1 to {LONGEST_KEY}")
    return f"once-{_digest(key)}"


def job_id_of_content(request: GenerationRequest) -> str:
    """The id that all jobs with the very same request share, whatever order its fields are in."""
    document = json.dumps(request.to_wire(), sort_keys=True, separators=(",", ":"))
    return f"same-{_digest(document)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
