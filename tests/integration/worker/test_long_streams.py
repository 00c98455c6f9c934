"""A job resumes from a long stream without reading it into memory at once."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from omlx_producer.wire import ChoiceDelta, TokensEvent, events_key
from omlx_worker.control.intake import PAGE, Intake
from omlx_worker.engine.rows.emission import Said
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from tests.helpers.fake_engine import FakeEngine
from tests.integration.worker.hostile_jobs import request


class Watched(Redis):
    """A client that remembers how many entries each reading of a stream brought."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: list[int] = []

    def xrange(self, *args: Any, **options: Any) -> Any:
        entries: Any = super().xrange(*args, **options)
        self.read.append(len(entries))
        return entries


@pytest.mark.parametrize("events", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7])
def test_a_long_stream_is_read_a_page_at_a_time(redis_url: str, events: int) -> None:
    engine = FakeEngine(1)
    with Watched.from_url(redis_url) as connection:
        for n in range(1, events + 1):
            delta = ChoiceDelta(index=0, text="a", tokens=[n])
            event = TokensEvent(job_id="j", n=n, choices=[delta])
            connection.xadd(events_key("j"), {"event": event.model_dump_json()}, id=f"{n}-0")
        engine.text_of = lambda row: Said("a" * row.produced)  # type: ignore[method-assign]
        data = request(max_completion_tokens=9000)
        claim = Claim("j", "omlx-1", "omlx:fake:default", 0.0, events, data, None)
        job = Intake(engine, "fake", connection).prepare(claim)
        assert isinstance(job, ActiveJob)
        assert (job.tokens, job.sent, job.choices[0].text) == (events, events, "a" * events)
        assert sum(connection.read) == events
        assert max(connection.read) <= PAGE
