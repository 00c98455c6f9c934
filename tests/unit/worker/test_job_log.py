"""The figures in the last log line of a job."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from omlx_producer.wire import ChoiceDelta, GenerationRequest, TokensEvent
from omlx_worker.delivery.job_log import JobLog
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim


def active(choices: int = 1) -> ActiveJob:
    claim = Claim("j", "omlx-1", "omlx:qwen:default", 100.0, 0, b"", None, False, enqueued_at=98.5)
    claim.claimed_at -= 10.0
    request = GenerationRequest(model="qwen", prompt="abc", n=choices)
    rows = [RowRequest(f"j:{choice}", [1, 2, 3], 100, Sampling()) for choice in range(choices)]
    return ActiveJob(claim, request, rows, streams=True)


def feed(job: ActiveJob, choice: int, *tokens: int, **figures: Any) -> None:
    job.rows[choice].tokens += tokens
    job.feed(Emission(f"j:{choice}", list(tokens), "t" * len(tokens), **figures))


def logged(caplog: pytest.LogCaptureFixture, job: ActiveJob) -> dict[str, Any]:
    with caplog.at_level(logging.INFO):
        JobLog().ended(job.claim, job, "finished", "")
    return vars(caplog.records[-1])


def test_the_accepted_share_is_told_where_drafts_were_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = active(choices=2)
    feed(job, 0, 1, 2, 3, drafted=3, accepted=2, finish_reason="stop")
    feed(job, 1, 4, 5, drafted=1, accepted=1, finish_reason="length")
    line = logged(caplog, job)
    assert line["message"] == (
        "job j finished: model qwen, priority default, queued seconds 1.5, prompt tokens 3, "
        f"tokens 5, tokens per second 0.5, accepted 0.75, finish reason stop/length, "
        f"run seconds {line['run_seconds']}"
    )
    plain = active()
    feed(plain, 0, 1)
    assert "accepted" not in logged(caplog, plain)


def test_the_tokens_that_were_not_read_are_told_where_there_are_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = active()
    assert "cached" not in logged(caplog, job)["message"]
    job.rows[0].cached = 2
    line = logged(caplog, job)
    assert line["cached_tokens"] == 2
    assert "prompt tokens 3, cached tokens 2, tokens 0" in line["message"]


def test_the_speed_does_not_count_the_tokens_of_an_interrupted_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = active()
    delta = ChoiceDelta(index=0, text="t" * 90, tokens=[7] * 90)
    job.resume([TokensEvent(job_id="j", n=90, choices=[delta])], lambda _: Said("t" * 90))
    feed(job, 0, 1, 2, 3, 4, 5)
    line = logged(caplog, job)
    assert (line["tokens"], line["tokens_per_second"]) == (95, 0.5)
