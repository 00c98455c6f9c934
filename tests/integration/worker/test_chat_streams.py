"""The stream of a chat with thinking and calls says what its result says, after a take-over too."""

from __future__ import annotations

from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from redis import Redis

from omlx_producer import ChatChunks, JobHandle, Producer, TokensEvent
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.workers import ALIAS, events, running_worker, wait_for

REQUEST: dict[str, Any] = {
    "model": ALIAS,
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_completion_tokens": 300,
    "seed": 3,
    "n": 3,
}


def streamed(job: JobHandle) -> list[Any]:
    """The choices as OpenAI's client puts them together from the chunks."""
    chunks, state = ChatChunks(job.id, ALIAS), ChatCompletionStreamState()
    thoughts: dict[int, str] = {}
    for event in job.stream():
        for chunk in chunks.take(event):
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
            [choice] = chunk["choices"]
            thought = choice["delta"].get("reasoning_content", "")
            thoughts[choice["index"]] = thoughts.get(choice["index"], "") + thought
    choices = state.current_completion_snapshot.choices
    return [
        {
            "content": choice.message.content or None,
            "reasoning_content": thoughts[choice.index],
            "tool_calls": [
                (call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ],
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]


def told(job: JobHandle) -> list[Any]:
    """The choices of the result."""
    choices = job.result(timeout=20).choices
    messages = [choice.message for choice in choices]
    return [
        {
            "content": message.content or None,
            "reasoning_content": message.reasoning_content,
            "tool_calls": [
                (call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or ()
            ],
            "finish_reason": choice.finish_reason,
        }
        for choice, message in zip(choices, messages, strict=True)
        if message is not None
    ]


def test_a_stream_says_what_the_result_says(redis_url: str, connection: Redis) -> None:
    with running_worker(redis_url), Producer(redis_url) as producer:
        wait_for_model(connection)
        job = producer.submit(REQUEST)
        assert streamed(job) == told(job)
        assert len(told(job)) == 3
        thoughts = sum(len(choice["reasoning_content"]) for choice in told(job))
        assert job.result().usage.completion_tokens_details.reasoning_tokens == thoughts
        assert all(choice["tool_calls"] and choice["reasoning_content"] for choice in told(job))
        again = producer.submit(REQUEST)
        names = [call[1:] for choice in told(job) for call in choice["tool_calls"]]
        assert [call[1:] for choice in told(again) for call in choice["tool_calls"]] == names


def test_a_worker_that_goes_on_says_the_same(redis_url: str, connection: Redis) -> None:
    with Producer(redis_url) as producer:
        with running_worker(redis_url, step_seconds=0.003):
            wait_for_model(connection)
            job = producer.submit(REQUEST)
            wait_for(lambda: len(events(connection, job.id)) > 20)
        taken_over = len(events(connection, job.id))
        with running_worker(redis_url):
            assert streamed(job) == told(job)
        found = [event for event in events(connection, job.id) if isinstance(event, TokensEvent)]
        assert 20 < taken_over < len(found)
        assert [event.markup is not None for event in found] == [True] + [False] * (len(found) - 1)
        assert all(choice["tool_calls"] for choice in told(job))
        thoughts = sum(len(choice["reasoning_content"]) for choice in told(job))
        assert job.result().usage.completion_tokens_details.reasoning_tokens == thoughts
