"""A job's events become the chunks that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from omlx_producer.client.chunks import ChatChunks
from omlx_producer.client.stream import FirstText
from omlx_producer.wire.events import (
    ChoiceDelta,
    EndEvent,
    FinishReason,
    TokenLogprob,
    TokensEvent,
    ToolCall,
    Usage,
)
from omlx_producer.wire.markup import Markup
from tests.helpers.markups import between

MARKS = between(("<think>", "</think>"), ("<call>", "</call>"), thinks=True)
USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall.model_validate(
        {"id": f"call_{name}", "function": {"name": name, "arguments": arguments}}
    )


def streamed(
    texts: Sequence[str],
    calls: Sequence[ToolCall] = (),
    reason: FinishReason = "stop",
    markup: Markup | None = MARKS,
) -> list[dict[str, Any]]:
    """The chunks of a job of one choice."""
    chunks = ChatChunks("j1", "demo")
    made = []
    for n, text in enumerate(texts, 1):
        delta = ChoiceDelta(index=0, text=text, tokens=[n])
        first = markup if n == 1 else None
        made += chunks.take(TokensEvent(job_id="j1", n=n, choices=[delta], markup=first))
    told = [list(calls)] if calls else []
    done = EndEvent(
        type="done",
        job_id="j1",
        n=len(texts),
        finish_reasons=[reason],
        tool_calls=told,
        usage=USAGE,
    )
    return made + list(chunks.take(done))


def test_the_first_text_is_content_alone() -> None:
    text = FirstText()
    thought = ChoiceDelta(index=0, text="Hm.</think>\nIt is", tokens=[1])
    other = ChoiceDelta(index=1, text="</think>No", tokens=[2])
    later = ChoiceDelta(index=0, text=" warm.<call>f</call>", tokens=[3])
    events = [
        TokensEvent(job_id="j1", n=2, choices=[thought, other], markup=MARKS),
        TokensEvent(job_id="j1", n=3, choices=[later]),
    ]
    assert [text.take(event) for event in events] == ["It is", " warm."]


def folded(chunks: list[dict[str, Any]]) -> Any:
    """What OpenAI's client makes of the chunks."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return state.get_final_completion().choices[0]


def told(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_thinking_content_and_calls_come_apart(size: int) -> None:
    text = "hm\n</think>\n\nI call.\n<call>\nf\n</call>\n<call>g</call>"
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = streamed(texts, [call("f", '{"x": 5}'), call("g")], "tool_calls")
    choice = folded(chunks)
    assert choice.message.content == told(chunks, "content") == "I call."
    assert told(chunks, "reasoning_content") == "hm"
    assert [called.id for called in choice.message.tool_calls] == ["call_f", "call_g"]
    assert choice.message.tool_calls[0].function.arguments == '{"x": 5}'
    assert choice.finish_reason == "tool_calls"


def test_text_comes_as_soon_as_it_is_certain() -> None:
    chunks = streamed(["a", "b"], markup=None)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]


@pytest.mark.parametrize("size", [1, 100])
def test_a_call_that_is_none_is_content(size: int) -> None:
    text = "</think>I call.\n<call>f</call> bye\n"
    chunks = streamed([text[at : at + size] for at in range(0, len(text), size)])
    assert folded(chunks).message.content == "I call.\n<call>f</call> bye\n"
    assert folded(chunks).message.tool_calls is None


def test_content_after_a_call_comes_with_the_end() -> None:
    chunks = streamed(["</think>a<call>f</call>b"], [call("f")], "tool_calls")
    assert folded(chunks).message.content == "a\nb"


def test_a_job_that_published_no_tokens_has_an_end() -> None:
    chunks = streamed([])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_log_probabilities_come_with_the_text_of_their_choice_or_with_its_end() -> None:
    chunks = ChatChunks("j1", "demo")
    made = []
    texts = ["<think>a", "b</think>", "", "c"]
    for n, text in enumerate(texts, 1):
        entry = TokenLogprob(token=f"t{n}", token_id=n, logprob=-n, top=[("x", 9, -0.5)])
        delta = ChoiceDelta(index=0, text=text, tokens=[n], logprobs=[entry])
        made += chunks.take(TokensEvent(job_id="j1", n=n, choices=[delta], markup=MARKS))
    delta = ChoiceDelta(index=0, text="", tokens=[5], logprobs=[entry])
    made += chunks.take(TokensEvent(job_id="j1", n=5, choices=[delta]))
    made += chunks.take(
        EndEvent(type="done", job_id="j1", n=5, finish_reasons=["stop"], usage=USAGE)
    )

    answer = folded(made)

    assert [entry.token for entry in answer.logprobs.content] == ["t1", "t2", "t3", "t4", "t4"]
    assert answer.logprobs.content[0].top_logprobs[0].token == "x"
    assert made[0]["choices"][0]["logprobs"] is None
    assert made[-1]["choices"][0]["logprobs"]["content"][0]["bytes"] == list(b"t4")


def test_the_usage_comes_in_a_last_chunk_of_its_own_if_it_was_asked_for() -> None:
    chunks = ChatChunks("j1", "demo", include_usage=True)
    delta = ChoiceDelta(index=0, text="a", tokens=[1])
    made = list(chunks.take(TokensEvent(job_id="j1", n=1, choices=[delta])))
    made += chunks.take(
        EndEvent(type="done", job_id="j1", n=1, finish_reasons=["stop"], usage=USAGE)
    )
    *others, last = made
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert (last["choices"], last["usage"]) == ([], USAGE.model_dump())
    state = ChatCompletionStreamState()
    for chunk in made:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    assert state.get_final_completion().usage.total_tokens == 3
    assert all("usage" not in chunk for chunk in streamed(["a"]))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_what_drafts_wrote_is_marked_in_its_part_wherever_markers_and_white_space_are(
    size: int,
) -> None:
    written = "hm [so]\n[</think>\n\nI] call [a cat]\n\n [.]"
    text, drafted = "", list[bool]()
    inside = False
    for character in written:
        if character in "[]":
            inside = character == "["
        else:
            text += character
            drafted.append(inside)
    chunks = ChatChunks("j1", "demo", include_drafted=True)
    marked = {"reasoning_content": "", "content": ""}
    for at in range(0, len(text), size):
        ranges = [(n, n + 1) for n, is_so in enumerate(drafted[at : at + size]) if is_so]
        n = at // size + 1
        delta = ChoiceDelta(index=0, text=text[at : at + size], tokens=[n], drafted=ranges)
        event = TokensEvent(job_id="j1", n=n, choices=[delta], markup=MARKS if n == 1 else None)
        for chunk in chunks.take(event):
            (choice,) = chunk["choices"]
            for name in marked.keys() & choice["delta"]:
                for start, end in choice.get("drafted", ()):
                    marked[name] += choice["delta"][name][start:end]
    assert marked == {"reasoning_content": "so", "content": "Ia cat."}
