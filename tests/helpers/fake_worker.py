"""Writes a job's events and its end as a worker does, with plain Redis calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import redis
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from omlx_producer.client.outcome import results_key
from omlx_producer.client.workers import WorkerFigures, write_figures
from omlx_producer.connection import server_time
from omlx_producer.wire import (
    MODELS_KEY,
    ChoiceDelta,
    EndEvent,
    FinishReason,
    JobEvent,
    Markup,
    ModelInfo,
    TokensEvent,
    Usage,
    events_key,
    token_digest,
    tokens_channel,
)


def announce(
    connection: redis.Redis,
    alias: str = "demo",
    context: int = 1024,
    longest: int = 8,
    at: float = 1e9,
    **fields: Any,
) -> None:
    """Make a model known, as a worker does that starts or goes on."""
    model = f"models/{alias}"
    info = ModelInfo(
        model=model, context_length=context, longest_token=longest, announced_at=at, **fields
    )
    connection.hset(MODELS_KEY, alias, info.model_dump_json())


def sign_on(
    connection: redis.Redis,
    name: str,
    model: str = "demo",
    cached: float | None = None,
    state: str = "busy",
    used: int = 2 * 2**30,
    **fields: Any,
) -> None:
    """Write the figures of a worker, as it does.

    Args:
        used: bytes of its memory.
    """
    known = {
        "name": name,
        "at": server_time(connection),
        "state": state,
        "uptime": 5,
        "jobs": 3,
        "rows": 3,
        "max_rows": 8,
        "waiting": 2,
        "mode": "auto",
        "depth": 2,
        "reason": "",
        "acceptance": 0.75,
        "cached": cached,
        "tokens_per_second": 123.4,
        "prompt_tokens_per_second": 0,
        "tokens": 9,
        "pauses": 0,
        "cache_bytes": 0,
        "weight_bytes": used,
        "memory_limit": 8 * 2**30,
    }
    write_figures(connection, model, WorkerFigures.model_validate(known | fields))


class FakeWorker:
    """Runs one job by hand.

    Attributes:
        texts: the text so far of each choice.
        n: the number of tokens so far.
        tokens: by choice.
    """

    def __init__(self, connection: redis.Redis, job_id: str, *, publish: bool = True) -> None:
        self.connection = connection
        self.job_id = job_id
        self.publish = publish
        self.n = 0
        self.texts: dict[int, str] = {0: ""}
        self.tokens: dict[int, list[int]] = {0: []}

    @property
    def job(self) -> Job:
        return Job.fetch(self.job_id, connection=self.connection, serializer=JSONSerializer)

    def start(self, worker_name: str = "fake-worker") -> None:
        """Take the job from its queue."""
        job = self.job
        self.connection.lrem(f"{RQ}:queue:{job.origin}", 0, self.job_id)
        self.connection.hset(job.key, mapping={"status": "started", "worker_name": worker_name})

    def step(
        self,
        text: str,
        *,
        tokens: int = 1,
        choice: int = 0,
        drafted: list[tuple[int, int]] | None = None,
        markup: Markup | None = None,
    ) -> TokensEvent:
        """Publish the tokens of one step; text without tokens counts as one."""
        ids = list(range(self.n, self.n + tokens))
        self.n += max(1, tokens)
        said, had = self.texts.get(choice, ""), self.tokens.get(choice, [])
        self.texts[choice], self.tokens[choice] = said + text, had + ids
        delta = ChoiceDelta(
            index=choice,
            text=text,
            tokens=ids,
            start=len(had),
            offset=len(said),
            digest=token_digest(had + ids),
            drafted=drafted,
        )
        event = TokensEvent(job_id=self.job_id, n=self.n, choices=[delta], markup=markup)
        self.append(event)
        return event

    def go_on_from(self, text: str, tokens: int) -> None:
        """Be a worker that goes on from a stream of one choice that ends there."""
        self.n, self.texts, self.tokens = tokens, {0: text}, {0: list(range(tokens))}

    def append(self, event: JobEvent, *, pipe: Any = None) -> None:
        pipe_ = self.connection.pipeline() if pipe is None else pipe
        payload = event.model_dump_json()
        pipe_.xadd(events_key(self.job_id), {"event": payload}, id=event.stream_id)
        if self.publish:
            pipe_.publish(tokens_channel(self.job_id), payload)
        if pipe is None:
            pipe_.execute()

    def finish(
        self,
        reason: FinishReason = "stop",
        *,
        event: bool = True,
        n: int | None = None,
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """End the job with its result, or with a body made up by the test.

        ``n`` counts tokens that were not published.
        """
        count = self.n if n is None else n
        usage = Usage(prompt_tokens=3, completion_tokens=count, total_tokens=3 + count)
        body = body or {
            "id": f"cmpl-{self.job_id}",
            "object": "text_completion",
            "choices": [
                {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
                for index, text in sorted(self.texts.items())
            ],
            "usage": usage.model_dump(),
        }
        done = EndEvent(
            type="done",
            job_id=self.job_id,
            n=count,
            finish_reasons=[reason] * len(self.texts),
            usage=usage,
        )
        self._end(done if event else None, "finished", Result.Type.SUCCESSFUL, body, None)
        return body

    def fail(
        self, error: str, code: str = "failed", field: str = "", *, event: bool = True
    ) -> None:
        cause = {"code": code, "field": field}
        failed = EndEvent(
            type="failed", job_id=self.job_id, n=self.n, error=error, code=code, field=field
        )
        self._end(failed if event else None, "failed", Result.Type.FAILED, None, error, cause)

    def stop(self, error: str = "the job was stopped on request") -> None:
        cancelled = EndEvent(type="cancelled", job_id=self.job_id, n=self.n, error=error)
        self._end(cancelled, "stopped", Result.Type.FAILED, None, error)

    def _end(
        self,
        event: JobEvent | None,
        status: str,
        kind: Result.Type,
        body: dict[str, Any] | None,
        error: str | None,
        cause: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        job = self.job
        with self.connection.pipeline() as pipe:
            if event is not None:
                self.append(event, pipe=pipe)
            last = (
                dict(cause)
                | Result(  # type: ignore[no-untyped-call]
                    self.job_id,
                    kind,
                    self.connection,
                    return_value=body,
                    exc_string=error,
                    serializer=JSONSerializer,
                ).serialize()
            )
            pipe.xadd(results_key(self.job_id), last)
            pipe.expire(results_key(self.job_id), 600)
            pipe.hset(job.key, "status", status)
            pipe.execute()
