"""The result of a finished job: what its rows have written, in OpenAI's form."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from omlx_producer.wire import Completion, End, EndEvent, InvalidRequest, PromptLogprob, ToolCall
from omlx_producer.wire.answer import chat_logprobs, choice_of, response_of, vectors_body
from omlx_producer.wire.events import CUTS, TextLogprobs
from omlx_producer.wire.markup import read
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.result import MAX_RESULT_BYTES, too_long
from omlx_worker.job import ActiveJob, WrittenChoice
from omlx_worker.queue.ending import Ending


def finished(job: ActiveJob) -> Ending:
    """The ending of a job whose rows have all finished."""
    body = response_body(job)
    completion = Completion(body)
    event = completion.end_event(
        job.id,
        job.sent if job.streams else max(job.sent, job.tokens),
        choices=[choice.end(index) for index, choice in enumerate(job.choices)] if job.sent else [],
        head=job.head if job.streams and not job.sent else None,
    )
    row_body = response_of(job.request, completion) if job.request.responses is not None else None
    ending = Ending(event, body, published=job.sent, row_body=row_body)
    # Base64 writes 4 characters for 3 bytes.
    if (size := len(ending.payload) // 4 * 3) > MAX_RESULT_BYTES:
        remedy = "ask for fewer choices, tokens or texts"
        refused = InvalidRequest("request", f"its answers {too_long(size)}", remedy)
        return Ending(EndEvent.of(job.id, event.n, End.refusing(refused)))
    return ending


def response_body(job: ActiveJob) -> dict[str, Any]:
    """The result of a finished job."""
    request, usage = job.request, job.usage()
    if request.input is not None:
        vectors = (array("f", choice.vector or b"") for choice in job.choices)
        return vectors_body(job.head, vectors, request.encoding_format, usage)
    chat = request.messages is not None
    scores: dict[str, Any] = {}
    if request.prompt_logprobs is not None:
        scores = {"prompt_logprobs": [each.in_vllm for each in job.prompt_logprobs]}
    if request.probabilities:
        choices = [_decided(job)]
    elif chat:
        choices = [_chat_choice(*each, request.logprobs) for each in enumerate(job.choices)]
    else:
        before = job.prompt_logprobs if request.echo else []
        choices = [
            _text_choice(*each, before, request.logprobs) | scores
            for each in enumerate(job.choices)
        ]
    whole = {**job.head, "choices": choices, "usage": usage.model_dump()}
    return whole | scores if chat else whole


def _decided(job: ActiveJob) -> dict[str, Any]:
    """The likeliest choice of a decision, and the probabilities of all."""
    shares = job.probabilities
    text = max(shares, key=shares.__getitem__)
    chat = job.request.messages is not None
    said = {"message": message_of(text, None, "")} if chat else {"text": text}
    return {**choice_of(0, said, "stop"), "probabilities": shares}


def _chat_choice(index: int, choice: WrittenChoice, logprobs: bool) -> dict[str, Any]:
    row, reason = choice.row.request, choice.finish_reason
    marks = [mark.offset for mark in choice.marks]
    message = message_of(choice.text, row.reply, row.row_id, marks=marks, cut=reason in CUTS)
    if "tool_calls" in message and reason == "stop":
        reason = "tool_calls"
    told = chat_logprobs(choice.logprobs) if logprobs else None
    return choice_of(index, {"message": message}, reason, told)


def _text_choice(
    index: int, choice: WrittenChoice, before: Sequence[PromptLogprob], logprobs: bool
) -> dict[str, Any]:
    told = TextLogprobs().take([*before, *choice.logprobs]) if logprobs else None
    if told and before:
        # Nothing scores the first token of a prompt.
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
    text = (choice.row.request.echo or "") + choice.text
    return choice_of(index, {"text": text}, choice.finish_reason, told)


def message_of(
    text: str,
    form: ReplyForm | None,
    row_id: str,
    *,
    marks: Collection[int] = (),
    cut: bool = False,
) -> dict[str, Any]:
    """The assistant's message for a whole text.

    Calls stay in the content if none can be read. An unreadable one beside others is dropped: it
    was cut, as a rule. Dropped are also those that the form has no room for. Content is None if
    there is no text beside calls.

    Args:
        marks: where in the text tokens that may write markers begin.
        cut: whether the text ended before the model ended it. A last call without its end marker
            is then read only by a syntax that shows where a call ends: a cut one may look whole.
        row_id: names the calls, so a retry gives them the same ids.
    """
    if form is None:
        return {"role": "assistant", "content": text}
    reply = read(text, form.markup, marks, cut=cut)
    written, last = reply.calls, list[str]()
    if cut and reply.in_call and form.markup.after("call"):
        written, last = written[:-1], written[-1:]
    calls = [call for each in written if form.read_call for call in form.read_call(each)]
    calls += [call for each in last if form.read_cut for call in form.read_cut(each)]
    calls = calls if form.parallel else calls[:1]
    if reply.calls and not calls:
        reply = read(text, form.markup, marks, calls=False, cut=cut)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["content"] = (reply.content.strip() and reply.content) or None
        message["tool_calls"] = [
            ToolCall(id=_call_id(row_id, index), function=call).model_dump()
            for index, call in enumerate(calls)
        ]
    return message


def _call_id(row_id: str, index: int) -> str:
    return f"call_{hashlib.blake2b(f'{row_id}:{index}'.encode(), digest_size=12).hexdigest()}"
