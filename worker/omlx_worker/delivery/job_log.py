"""The log lines of a job: one when it starts, one when it leaves this worker.

They carry ids and figures, never a prompt or a text. Jobs of a bulk queue log at debug level.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from omlx_worker.delivery.observers import JobObserver
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker.jobs")


WELL = ("finished", "cancelled", "given back")


class JobLog(JobObserver):
    """Writes the lines."""

    def started(self, job: ActiveJob) -> None:
        _log(_level(job.claim), job.claim, "starts", {"prompt_tokens": job.prompt_tokens})

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:
        seconds = max(time.monotonic() - claim.claimed_at, 0.001)
        figures: dict[str, Any] = {}
        if job is not None:
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
        _log(_level(claim) if outcome in WELL else logging.WARNING, claim, outcome, figures)


class JobCounts(JobObserver):
    """Counts for the lines of the log that sum up.

    Attributes:
        finished: jobs.
        cut: of their texts those that ended at their limit of tokens. One of 0 tokens is not cut.
    """

    def __init__(self) -> None:
        self.finished = self.cut = 0

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:  # noqa: ARG002
        if outcome == "finished":
            self.finished += 1
            self.cut += job.finish_reasons.count("length") if job and job.tokens else 0


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
