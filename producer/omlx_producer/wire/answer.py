"""Answers in OpenAI's forms: whole, in chunks, as a response, and as vectors.

A head is what every body of an answer begins with. A worker makes it, once for a job: the first
event and the result hold it, so chunks and whole bodies that are made of them say the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omlx_producer.wire.completion import Completion
from omlx_producer.wire.embedding import EncodingFormat, write_vector
from omlx_producer.wire.events import FinishReason, TokenLogprob, Usage
from omlx_producer.wire.request import GenerationRequest

Body = dict[str, Any]

CHAT, TEXT = "chat.completion", "text_completion"
_PREFIXES = {CHAT: "chatcmpl", TEXT: "cmpl"}
# Fields of a head that other forms of an answer lack, or name otherwise.
_OF_COMPLETIONS = frozenset({"id", "object", "created", "system_fingerprint"})
# Figures of a completion by their names in a response.
_FIGURES = {
    "input_tokens": "prompt_tokens",
    "input_tokens_details": "prompt_tokens_details",
    "output_tokens": "completion_tokens",
    "output_tokens_details": "completion_tokens_details",
}
_RENAMED = {old: new for new, old in _FIGURES.items()}
# Reasons of incomplete answers. That of a text that repeats itself is none of OpenAI's.
_CUTS: dict[FinishReason, str] = {"length": "max_output_tokens", "repetition": "repetition"}


def head_of(request: GenerationRequest, job_id: str, created: int, fingerprint: str | None) -> Body:
    """The head of an answer."""
    common = {"model": request.model}
    if request.input is not None:
        return {"object": "list", **common}
    kind = TEXT if request.messages is None else CHAT
    return {**begun_head(kind, job_id, created), "system_fingerprint": fingerprint, **common}


def begun_head(kind: str, job_id: str, created: int) -> Body:
    """What the head of a `CHAT` or a `TEXT` says of its job."""
    return {"id": f"{_PREFIXES[kind]}-{job_id}", "object": kind, "created": created}


def common_fields(head: Mapping[str, Any]) -> Body:
    """What all forms of an answer repeat of its head."""
    return {name: value for name, value in head.items() if name not in _OF_COMPLETIONS}


def choice_of(
    index: int, said: Body, finish_reason: FinishReason | None, logprobs: Body | None = None
) -> Body:
    """A choice, or a chunk's part of one.

    Args:
        said: its ``message``, ``text`` or ``delta``.
    """
    return {"index": index, **said, "finish_reason": finish_reason, "logprobs": logprobs}


def chat_logprobs(entries: Sequence[TokenLogprob]) -> Body:
    """Those of a choice of a chat."""
    return {"content": [entry.in_chat for entry in entries]}


def joined(completions: Sequence[Completion]) -> Body:
    """One answer to several prompts: all choices in order, and the sum of their tokens."""
    choices = [choice for each in completions for choice in each["choices"]]
    return {
        **completions[0],
        "choices": [{**choice, "index": index} for index, choice in enumerate(choices)],
        "usage": {
            name: sum(each["usage"][name] for each in completions)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        },
    }


def vectors_body(
    head: Body, vectors: Iterable[array[float]], encoding: EncodingFormat | None, usage: Usage
) -> Body:
    """The vectors of texts.

    Args:
        encoding: by default base64.
    """
    data = [
        {"object": "embedding", "index": index, "embedding": write_vector(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    return {**head, "data": data, "usage": usage.model_dump()}


def response_of(request: GenerationRequest, completion: Completion) -> Body:
    """The ``response`` of a request that `chat_fields` has made, from its chat completion."""
    job_id, choice = job_of(completion), completion["choices"][0]
    reason, message = choice["finish_reason"], choice["message"]
    items, calls = list[Body](), message.get("tool_calls") or ()
    if thought := message.get("reasoning_content"):
        items.append(text_item(job_id, "reasoning", thought, reason))
    if message["content"] or not (items or calls):
        items.append(text_item(job_id, "message", message["content"] or "", reason))
    items += [call_item(job_id, index, call) for index, call in enumerate(calls)]
    return ended_response(begun_response(request, completion.head), reason, items, completion.usage)


def job_of(head: Mapping[str, Any]) -> str:
    """The job whose completion has this head."""
    return str(head["id"]).partition("-")[2]


def begun_response(request: GenerationRequest, head: Mapping[str, Any]) -> Body:
    """The ``response`` of a request that `chat_fields` has made, before there is any output."""
    sent = request.to_wire()
    echo = sent.get("responses", {})
    choice_of_tool = sent.get("tool_choice", "auto")
    return {
        **common_fields(head),
        "id": f"resp_{job_of(head)}",
        "object": "response",
        "created_at": head["created"],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": sent["messages"][0]["content"] if echo.get("instructions") else None,
        "max_output_tokens": request.max_completion_tokens,
        "metadata": echo.get("metadata", {}),
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "temperature": request.temperature,
        "text": {"format": _flat_format(sent.get("response_format"))},
        "tool_choice": choice_of_tool if isinstance(choice_of_tool, str) else _flat(choice_of_tool),
        "tools": [
            {"description": None, "parameters": None, "strict": None, **_flat(tool)}
            for tool in sent.get("tools", ())
        ],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def ended_response(begun: Body, reason: FinishReason, output: list[Body], usage: Usage) -> Body:
    """A ``response`` with its output."""
    figures = {_RENAMED.get(name, name): value for name, value in usage.model_dump().items()}
    figures["input_tokens_details"]["cache_write_tokens"] = 0
    return {
        **begun,
        "status": status_of(reason),
        "incomplete_details": {"reason": _CUTS[reason]} if reason in _CUTS else None,
        "output": output,
        "usage": figures,
    }


def status_of(reason: FinishReason | None) -> str:
    """That of a response, or of an item, that has ended so; None while it is written."""
    if reason is None:
        return "in_progress"
    return "incomplete" if reason in _CUTS else "completed"


def text_item(job_id: str, kind: str, text: str, reason: FinishReason | None) -> Body:
    """An item of an output: a thought if ``kind`` is ``reasoning``, else a message.

    Args:
        reason: None while it is written.
    """
    if kind == "reasoning":
        part: Body = {"type": "reasoning_text", "text": text}
        return {"type": "reasoning", "id": f"rs_{job_id}", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": f"msg_{job_id}", "role": "assistant"}
    return {**item, "status": status_of(reason), "content": [part]}


def call_item(job_id: str, index: int, call: Mapping[str, Any]) -> Body:
    """An item of an output: a call of a function."""
    return {
        "type": "function_call",
        "id": f"fc_{job_id}_{index}",
        "call_id": call["id"],
        **call["function"],
        "status": "completed",
    }


def as_completion(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chat completion, without its head, of a ``response``. Other bodies are as given."""
    if body.get("object") != "response":
        return body
    message: Body = {"role": "assistant", "content": ""}
    calls = []
    for item in body["output"]:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            text = "".join(part["text"] for part in item["content"])
            message[name] = message.get(name, "") + text
    if calls:
        message["tool_calls"] = calls
    reason: FinishReason = "tool_calls" if calls else "stop"
    cut = (body["incomplete_details"] or {}).get("reason")
    reason = next((name for name, told in _CUTS.items() if told == cut), reason)
    return {
        "choices": [choice_of(0, {"message": message}, reason)],
        "usage": {_FIGURES.get(name, name): value for name, value in body["usage"].items()},
    }


def _flat(given: Body) -> Body:
    return {"type": "function", **given["function"]}


def _flat_format(given: Body | None) -> Body:
    if given is None or given["type"] != "json_schema":
        return given or {"type": "text"}
    return {"type": "json_schema", **given["json_schema"]}
