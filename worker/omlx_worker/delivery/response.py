"""The OpenAI response body of a finished job: for messages a chat completion, else a text one."""

from __future__ import annotations

import codecs
from typing import Any

from omlx_producer.wire import DoneEvent, TokenLogprob, Usage
from omlx_producer.wire.completion import Completion
from omlx_worker.delivery.message import message_of
from omlx_worker.job import ActiveJob, Choice
from omlx_worker.queue.ending import Ending


def finished(job: ActiveJob) -> Ending:
    """The ending of a job whose rows have all finished."""
    usage = job.usage()
    body = response_body(job, usage)
    completion = Completion(body)
    event = DoneEvent(
        job_id=job.id,
        n=job.sent if job.streams else max(job.sent, job.tokens),
        finish_reasons=[choice.finish_reason for choice in completion.choices],
        choices=[choice.end(index) for index, choice in enumerate(job.choices)] if job.sent else [],
        tool_calls=completion.tool_calls,
        usage=usage,
    )
    return Ending("finished", event, body, published=job.sent)


def response_body(job: ActiveJob, usage: Usage) -> dict[str, Any]:
    """The result of a finished job."""
    chat = job.request.messages is not None
    write = _chat_choice if chat else _text_choice
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{job.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": job.created,
        "model": job.request.model,
        "system_fingerprint": job.fingerprint,
        "choices": [
            write(index, choice, job.request.logprobs) for index, choice in enumerate(job.choices)
        ],
        "usage": usage.model_dump(),
    }


def _chat_choice(index: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
    row = choice.row.request
    cut = choice.finish_reason == "length"
    marks = [mark.place for mark in choice.marks]
    message = message_of(choice.text, row.reply, row.row_id, marks=marks, cut=cut)
    calls = "tool_calls" in message and choice.finish_reason == "stop"
    return {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls else choice.finish_reason,
        "logprobs": {"content": [each.in_chat for each in choice.logprobs]} if logprobs else None,
    }


def _text_choice(index: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "logprobs": _text_logprobs(choice.logprobs) if logprobs else None,
    }


def _text_logprobs(entries: list[TokenLogprob]) -> dict[str, Any]:
    offsets, offset = [], 0
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for entry in entries:
        offsets.append(offset)
        offset += len(characters.decode(bytes(entry.written)))
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{token: logprob for token, _, logprob, *_ in e.top} for e in entries],
        "text_offset": offsets,
    }
