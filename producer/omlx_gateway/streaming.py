"""A job's events as server-sent events, in the chunks of OpenAI's streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request

from omlx_gateway.access import require_still
from omlx_gateway.gateway import Gateway, cancel
from omlx_producer import AsyncJobHandle, AsyncTokenStream, ChatChunks, TextChunks, TokensLost
from omlx_producer.client.response_events import ResponseEvents
from omlx_producer.wire import EndEvent, GenerationRequest, JobEvent, TokensEvent

# A comment, so that nobody between here and the client takes a waiting stream for a dead one.
PING_SECONDS = 15.0
PING = b": waiting\n\n"
END = b"data: [DONE]\n\n"


class JobStream:
    """How a stream is written.

    Args:
        is_chat: chunks of chats, else of text completions.
        model: that the chunks name.
        options: arguments of the chunks.

    Attributes:
        echoed: what a response repeats of its request; None if this is no stream of one.
        numbered: events of a response that a client has received which goes on with its stream.
    """

    def __init__(self, is_chat: bool, model: str, options: dict[str, bool]) -> None:
        self.is_chat = is_chat
        self.model = model
        self.options = options
        self.echoed: GenerationRequest | None = None
        self.numbered = 0

    def chunks(self, job_id: str) -> ChatChunks | TextChunks | ResponseEvents:
        if self.echoed is not None:
            return ResponseEvents(job_id, self.model, self.echoed)
        kind = ChatChunks if self.is_chat else TextChunks
        return kind(job_id, self.model, **self.options)

    @staticmethod
    def data(body: dict[str, Any], event_id: str = "") -> bytes:
        told = f"id: {event_id}\n" if event_id else ""
        if kind := body.get("type"):
            told += f"event: {kind}\n"
        return f"{told}data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


async def event_stream(
    request: Request, job: AsyncJobHandle, form: JobStream, cursor: int, *, keep: bool
) -> AsyncGenerator[bytes]:
    """The events of a job after a cursor, as they come.

    The last chunk of each event has an id, ``<job>:<tokens so far>``, from which a stream that was
    cut goes on: `ChatChunks` are made from the first event again, and those before are not sent.
    The id of a response's event also ends in the count of its events, since a job that runs again
    may spread the same tokens over other events. The job is cancelled if this ends before the job
    does, unless ``keep``.

    Raises:
        JobFailed, JobCancelled: after what the job has produced. A response tells it as an event.
        TokensLost: if no event ends at the cursor.
        ApiError: 401 once the key of the request was removed.
    """
    gateway = Gateway.of(request)
    chunks, over = form.chunks(job.id), False
    stream = job.stream()
    waiting: asyncio.Future[JobEvent] | None = None
    try:
        while not over:
            waiting = asyncio.ensure_future(anext(stream))
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=PING_SECONDS)
                require_still(request)
                if not waiting.done():
                    yield PING
            event = await waiting
            over = event.type != "tokens"
            had = isinstance(event, TokensEvent) and event.since < cursor
            if had and event.n > cursor:
                told = f"no event of job {job.id} ends at token {cursor}, its last run has others"
                raise TokensLost(f"{told}; ask again without Last-Event-ID", 0)
            if isinstance(chunks, ResponseEvents) and form.numbered and not had:
                chunks.told, form.numbered = form.numbered, 0
            is_event = isinstance(chunks, ResponseEvents) and chunks.told
            if isinstance(event, EndEvent) and not (event.end.ok or is_event):
                raise event.end.error(job.id)
            bodies = list(chunks.take(event))
            for part in [] if had else _parts(job.id, event, bodies):
                yield part
        if form.echoed is None:
            yield END
    finally:
        if not (over or keep):
            gateway.begin(cancel(job))
        # Whoever cancels this task may cancel it again at every await.
        gateway.begin(_leave(stream, waiting))


async def _leave(stream: AsyncTokenStream, waiting: asyncio.Future[JobEvent] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.cancel()
        await asyncio.wait({waiting})
    await stream.aclose()


def _parts(job_id: str, event: JobEvent, bodies: list[dict[str, Any]]) -> Iterator[bytes]:
    for number, body in enumerate(bodies, 1):
        place = f"{job_id}:{event.n}"
        if "sequence_number" in body:
            place += f":{body['sequence_number'] + 1}"
        yield JobStream.data(body, place if number == len(bodies) else "")
