"""The log lines of a job: one when it starts, one when it leaves this worker.

They carry ids and figures, never a prompt or a text. Jobs of a bulk queue log at debug level.
"""

from __future__ import annotations

import logging
import time
import traceback
from pathlib import Path
from typing import Any

from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker.jobs")


def log_start(job: ActiveJob) -> None:
    """The job goes to the decode thread."""
    _log(_level(job.claim), job.claim, "starts", {"prompt_tokens": job.prompt_tokens})


def log_end(claim: Claim, job: ActiveJob | None, outcome: str, error: str = "") -> None:
    """The job has left this worker.

    Args:
        job: None if it did not start, or if its figures are gone.
        outcome: finished, failed, stopped, retried, given back, lost, or refused (by Redis).
    """
    seconds = max(time.monotonic() - claim.claimed_at, 0.001)
    figures: dict[str, Any] = {}
    if job is None:
        # What follows the field's name may quote the request.
        error = error.partition(": ")[0]
    else:
        figures["prompt_tokens"] = job.prompt_tokens
        if job.cached_tokens:
            figures["cached_tokens"] = job.cached_tokens
        figures["tokens"] = job.tokens
        figures["tokens_per_second"] = round((job.tokens - job.resumed_tokens) / seconds, 1)
        if job.drafts.drafted:
            figures["accepted"] = round(job.drafts.acceptance, 3)
        if job.finished:
            figures["finish_reason"] = "/".join(job.finish_reasons)
    figures["run_seconds"] = round(seconds, 3)
    if error:
        figures["error"] = error
    bad = outcome in ("failed", "retried", "lost", "refused")
    _log(logging.WARNING if bad else _level(claim), claim, outcome, figures)


def log_unmade(claim: Claim, error: Exception) -> None:
    """Making a job's event or result raised. The error's message is left out: it may quote text."""
    frames = traceback.extract_tb(error.__traceback__)
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    log.error("cannot make the result of job %s: %s at %s", claim.id, type(error).__name__, places)


def _level(claim: Claim) -> int:
    return logging.DEBUG if claim.priority == "bulk" else logging.INFO


def _log(level: int, claim: Claim, what: str, figures: dict[str, Any]) -> None:
    """Log ``job ID finished: model qwen, tokens 96, ...``, with all of it as fields too."""
    facts: dict[str, Any] = {"model": claim.model, "priority": claim.priority}
    if claim.queued_seconds is not None:
        facts["queued_seconds"] = round(claim.queued_seconds, 3)
    facts |= figures
    text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    extra = {"job": claim.id, "event": what} | facts
    log.log(level, "job %s %s: %s", claim.id, what, text, extra=extra)
