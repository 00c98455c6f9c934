"""A job's events become those of a streamed response, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from omlx_producer.client.response_events import ResponseEvents
from omlx_producer.wire import Completion, EndEvent, GenerationRequest, JobEvent
from omlx_producer.wire.answer import response_of
from omlx_producer.wire.events import ChoiceDelta, FinishReason, TokensEvent, ToolCall, Usage
from omlx_producer.wire.responses import chat_fields
from tests.helpers.markups import between

MARKS = between(("<think>", "</think>"), ("<call>", "</call>"), thinks=True)
USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
REQUEST = GenerationRequest.parse(chat_fields({"model": "demo", "input": "a"}))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def tokens(n: int, text: str) -> TokensEvent:
    delta = ChoiceDelta(index=0, text=text, tokens=[n])
    return TokensEvent(job_id="j", n=n, choices=[delta], markup=MARKS if n == 1 else None)


def done(reason: FinishReason = "stop", *calls: ToolCall) -> EndEvent:
    told = [list(calls)] if calls else []
    return EndEvent(
        type="done", job_id="j", n=9, finish_reasons=[reason], tool_calls=told, usage=USAGE
    )


def streamed(*events: JobEvent) -> list[dict[str, Any]]:
    """The events of a response, in the order of their numbers and in OpenAI's types."""
    made = ResponseEvents("j", "demo", REQUEST)
    told = []
    for event in events:
        for each in made.take(event):
            parsed = EVENT.validate_python(each)
            dumped = parsed.model_dump(mode="json", exclude_unset=True, by_alias=True)
            assert dumped == each
            told.append(dumped)
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [each["type"].removeprefix("response.") for each in told]


def folded(told: list[dict[str, Any]]) -> Any:
    """The response that OpenAI's client makes of the events."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for each in told:
        state.handle_event(EVENT.validate_python(each))
    return state._completed_response


def test_thoughts_text_and_calls_are_items_of_the_output_that_a_whole_response_has() -> None:
    call = ToolCall.model_validate(
        {"id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    )
    texts = ["Hm", ".</think>", "It is", " warm.", '<call>{"name": "f"}</call>']
    told = streamed(*(tokens(n, text) for n, text in enumerate(texts, 1)), done("tool_calls", call))
    item = ["output_item.added", "content_part.added"]
    assert kinds(told) == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(*item, "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    message = {
        "role": "assistant",
        "content": "It is warm.",
        "reasoning_content": "Hm.",
        "tool_calls": [call.model_dump()],
    }
    completion = {
        "id": "chatcmpl-j",
        "created": told[0]["response"]["created_at"],
        "model": "demo",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": USAGE.model_dump(),
    }
    assert told[-1]["response"] == response_of(REQUEST, Completion(completion))
    response = folded(told)
    assert response.output_text == "It is warm."
    assert response.output[-1].arguments == '{"a": 1}'


def test_a_response_that_was_cut_is_incomplete() -> None:
    told = streamed(tokens(1, "x</think>It"), done("length"))
    assert kinds(told)[-1] == "incomplete"
    response = told[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item.get("status") for item in response["output"]] == [None, "incomplete"]


def test_a_response_of_no_text_has_an_empty_message() -> None:
    [item] = folded(streamed(done())).output
    assert (item.type, item.content[0].text) == ("message", "")


def test_a_failure_is_an_event_once_the_response_has_others() -> None:
    for end in (
        EndEvent(type="failed", job_id="j", n=1, error="why"),
        EndEvent(type="cancelled", job_id="j", n=1, error="why"),
    ):
        assert streamed(end) == []
        told = streamed(tokens(1, "It</think>"), end)
        assert kinds(told)[-1] == "failed"
        assert told[-1]["response"]["error"] == {"code": "server_error", "message": "why"}
