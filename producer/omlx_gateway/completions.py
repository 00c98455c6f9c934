"""Chats, text completions, responses, vectors and rerankings: jobs whose results are the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

from redis import Redis
from rq.exceptions import DeserializationError
from rq.job import Job
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omlx_gateway.access import (
    allowed_priority,
    own_salt,
    owner_of,
    require_model,
    require_still,
    secret_of,
)
from omlx_gateway.errors import ApiError, api_error
from omlx_gateway.gateway import Gateway, cancel, read_priority
from omlx_gateway.rerank import Reranking
from omlx_gateway.streaming import JobStream, event_stream
from omlx_producer import AsyncJobHandle, InvalidRequest, JobCancelled, JobFailed
from omlx_producer.client.outcome import fetch_job, unknown_job
from omlx_producer.wire import (
    CHAT_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    RESPONSES_URL,
    Completion,
    End,
    GenerationRequest,
    read_queue_name,
)
from omlx_producer.wire.answer import joined, response_of, vectors_body
from omlx_producer.wire.responses import chat_fields

RESULT_SECONDS = 3600
MAX_PROMPTS = 128
MAX_ANSWER_BYTES = 32 * 2**20
"""Of an answer to several prompts."""
RERANK_URL = "/v1/rerank"
_STREAM_OPTIONS = ("include_usage", "include_drafted", "include_obfuscation")
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,255}):(\d{1,18})(?::(\d{1,18}))?")


async def chat(request: Request) -> Response:
    return await _complete(request, "messages", "prompt")


async def text(request: Request) -> Response:
    return await _complete(request, "prompt", "messages")


async def response(request: Request) -> Response:
    return await _complete(request, "input", "messages")


async def embeddings(request: Request) -> Response:
    return await _complete(request, "input", "messages")


async def rerank(request: Request) -> Response:
    return await _complete(request, "query", "messages")


async def _complete(request: Request, own: str, foreign: str) -> Response:
    """Answer a request.

    Args:
        own: the field of its prompt.
        foreign: a field of another endpoint's prompt, which is refused.
    """
    url = request.url.path
    gateway, owner = Gateway.of(request), owner_of(request)
    priority = allowed_priority(request, read_priority(request))
    key = request.headers.get("idempotency-key")
    # A client with a key comes again.
    detached = key is not None or _asks_to_detach(request)
    if key and owner:
        key = secret_of(owner, f"idempotency_key:{key}")
    jobs, prompts = list[AsyncJobHandle](), None
    async with gateway.body_of(request) as body:
        if body.get(foreign) is not None:
            raise InvalidRequest(foreign, "unknown here", f"give {own}")
        if body.get(own) is None:
            raise InvalidRequest(own, "missing", f"give {own}")
        model = body.get("model")
        require_model(request, model if isinstance(model, str) else None)
        if url == RESPONSES_URL:
            body = await run_in_threadpool(chat_fields, body)
        ranking = await run_in_threadpool(Reranking.of, body) if url == RERANK_URL else None
        floats = url == EMBEDDINGS_URL and body.get("encoding_format") in (None, "float")
        if floats:
            body.pop("encoding_format", None)
        body["cache_salt"] = salt = own_salt(owner, body.get("cache_salt"))
        streams = body.get("stream") is True
        form = JobStream(own == "messages", str(model or ""), _stream_options(body))
        last = request.headers.get("last-event-id")
        if last and not streams:
            told = (
                f"got {last!r:.80}, and no stream is asked for; give stream: true, or leave it out"
            )
            raise ApiError(400, f"Last-Event-ID: {told}")
        if not last:
            if ranking:
                bodies = ranking.chats(salt)
            else:
                bodies = [{**body, "stream": True}] if streams else _each_prompt(body)
            keys = [key and f"{key}:{n}" for n in range(len(bodies))] if bodies[1:] else [key]
            prompts = "documents" if ranking else own if bodies[1:] else None
            with _naming(prompts):
                jobs = await gateway.producer.submit_many(
                    bodies, priority=priority, idempotency_keys=keys
                )
            form.model = form.model or jobs[0].queue.split(":")[1]
            del bodies
        if url == RESPONSES_URL:
            form.echoed = await run_in_threadpool(_echoed, body)
    # The answer may take an hour.
    del body
    if last:
        return await _go_on(request, last, form, salt if owner else None)
    if streams:
        return await _stream(request, jobs[0], form, 0, keep=detached)
    results = await _results_unless_gone(request, jobs, prompts, keep=detached)
    if results is None:
        return Response(status_code=499)
    require_still(request)
    headers = {"X-Omlx-Job": ",".join(job.id for job in jobs)}
    if form.echoed is not None:
        return JSONResponse(response_of(form.echoed, results[0]), headers=headers)
    if ranking:
        return JSONResponse(ranking.answer(results), headers=headers)
    if floats:
        written = await run_in_threadpool(_with_floats, results[0])
        return Response(written, media_type="application/json", headers=headers)
    return JSONResponse(results[0] if len(results) == 1 else joined(results), headers=headers)


async def _results_unless_gone(
    request: Request, jobs: list[AsyncJobHandle], prompts: str | None, *, keep: bool
) -> list[Completion] | None:
    """The results of a request's jobs; None if its client hangs up before.

    The jobs are cancelled if it does, or if one of several has failed.

    Args:
        prompts: see `_naming`.
        keep: whether they go on instead.
    """
    over = False
    try:
        results: list[Completion] | None = await _unless_gone(request, _results(jobs, prompts))
        over = results is not None
    except (JobFailed, JobCancelled):
        over = len(jobs) == 1
        raise
    finally:
        if not (over or keep):
            for job in jobs:
                Gateway.of(request).begin(cancel(job))
    return results


def _echoed(body: dict[str, Any]) -> GenerationRequest:
    """What a response repeats of its request: no message but its instructions."""
    asked = GenerationRequest.parse({"model": "x", **body})
    return asked.model_copy(update={"messages": (asked.messages or [])[:1]})


async def _results(jobs: list[AsyncJobHandle], prompts: str | None) -> list[Completion]:
    """The results of all prompts of a request.

    Args:
        prompts: see `_naming`.

    Raises:
        InvalidRequest: if they are too long for one answer. A worker bounds each of them.
    """
    left = MAX_ANSWER_BYTES

    async def result(number: int, job: AsyncJobHandle) -> Completion:
        nonlocal left
        with _naming(prompts, number):
            made = await job.result(RESULT_SECONDS)
        left -= len(json.dumps(made)) if len(jobs) > 1 else 0
        if left < 0:
            most = f"{MAX_ANSWER_BYTES // 2**20} MiB"
            got = f"the answers to {len(jobs)} prompts take more than {most}"
            raise InvalidRequest("prompt", got, "give fewer prompts, or upload a batch")
        return made

    return await asyncio.gather(*(result(number, job) for number, job in enumerate(jobs)))


@contextlib.contextmanager
def _naming(prompts: str | None, number: int = 0) -> Iterator[None]:
    """Let an error of one of several prompts name its place in the request.

    Args:
        prompts: the field of the request that lists them; None without a list.
        number: that of the prompt whose job is waited for.
    """
    try:
        yield
    except (InvalidRequest, JobFailed) as error:
        if prompts is None:
            raise
        if isinstance(error, InvalidRequest) and error.index is not None:
            number = error.index
        place = f"{prompts}[{number}]" if error.field in ("messages", "prompt") else error.field
        if isinstance(error, JobFailed):
            end = End(error.code, error.sentence, place or "", error.remedy)
            raise end.error(error.job_id) from None
        error.index, error.field = None, place
        raise


def _each_prompt(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A request for each prompt of a text completion, which may have a list of them."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], str | list):
        return [body]
    if len(prompts) > MAX_PROMPTS:
        remedy = f"give at most {MAX_PROMPTS}, or upload a batch"
        raise InvalidRequest("prompt", f"got {len(prompts)} prompts", remedy)
    return [{**body, "prompt": prompt} for prompt in prompts]


def _with_floats(result: Completion) -> bytes:
    """A result as JSON, with its vectors as lists of numbers."""
    return json.dumps(vectors_body(result.head, result.vectors, "float", result.usage)).encode()


def _stream_options(body: dict[str, Any]) -> dict[str, bool]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        remedy = "give an object with include_usage"
        raise InvalidRequest("stream_options", f"got {options!r:.60}", remedy)
    for name in options:
        if name not in _STREAM_OPTIONS:
            remedy = f"give {', '.join(_STREAM_OPTIONS)}"
            raise InvalidRequest("stream_options", f"got the field {name!r:.60}", remedy)
    return {name: options.get(name) is True for name in ("include_usage", "include_drafted")}


def _asks_to_detach(request: Request) -> bool:
    asked = request.headers.get("x-omlx-detach", "")
    if asked.lower() not in ("true", "false", ""):
        raise ApiError(400, f"X-Omlx-Detach: got {asked!r:.80}; give true or false")
    return asked.lower() == "true"


async def _go_on(request: Request, last: str, form: JobStream, salt: str | None) -> Response:
    """Go on with a stream that was cut, of this gateway or another one.

    Args:
        salt: that the job must have, as those of the request's key do; None for any job.
    """
    gateway = Gateway.of(request)
    found = _EVENT_ID.fullmatch(last)
    if found is None:
        raise ApiError(400, f"Last-Event-ID: got {last!r:.80}; give the id of an event")
    queue = await run_in_threadpool(_find_queue, gateway.blocking, found[1], salt)
    job = AsyncJobHandle(found[1], queue, gateway.producer)
    form.numbered = int(found[3] or 0)
    return await _stream(request, job, form, int(found[2]), keep=True)


def _find_queue(connection: Redis, job_id: str, salt: str | None) -> str:
    """The queue of a job that has a salt.

    Raises:
        UnknownJob: if there is none.
    """
    job = fetch_job(connection, job_id)
    if read_queue_name(job.origin) is None or (salt is not None and _salt_of(job) != salt):
        raise unknown_job(job_id)
    return job.origin


def _salt_of(job: Job) -> Any:
    """The cache salt of a job's request, from a payload that may be anything."""
    with contextlib.suppress(DeserializationError):
        match job.kwargs:
            case {"request": {"cache_salt": salt}}:
                return salt
    return None


async def _stream(
    request: Request, job: AsyncJobHandle, form: JobStream, cursor: int, *, keep: bool
) -> Response:
    """The answer whose body is the job's events.

    Its first part is awaited: a job that fails before it answers with the status of its failure.

    Args:
        cursor: tokens that the client has had.
        keep: whether the job goes on without its client.
    """
    parts = event_stream(request, job, form, cursor, keep=keep)
    try:
        first = await _unless_gone(request, anext(parts))
    except BaseException:
        await parts.aclose()
        raise
    if first is None:
        await parts.aclose()
        return Response(status_code=499)
    return EventStream(first, parts, {"X-Omlx-Job": job.id})


class EventStream(StreamingResponse):
    """Server-sent events, which end with an error's body if there is one, as OpenAI's do."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        told = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(self._parts(first), media_type="text/event-stream", headers=told)
        self._rest = rest

    async def _parts(self, first: bytes) -> AsyncGenerator[bytes]:
        yield first
        try:
            async for part in self._rest:
                yield part
        except Exception as error:  # noqa: BLE001 (`api_error` raises those of other kinds)
            yield JobStream.data(api_error(error).body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Starlette leaves the generator where it was when the client went.
            await self._rest.aclose()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The outcome of some work; None if the client hangs up before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        # A generator that still runs cannot be closed.
        await asyncio.wait({task, gone})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Metrics name these functions.
routes = [
    Route(CHAT_URL, chat, methods=["POST"]),
    Route(COMPLETION_URL, text, methods=["POST"]),
    Route(RESPONSES_URL, response, methods=["POST"]),
    Route(EMBEDDINGS_URL, embeddings, methods=["POST"]),
    Route(RERANK_URL, rerank, methods=["POST"]),
]
