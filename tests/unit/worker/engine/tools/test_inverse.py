"""Reading is the inverse of the grammar: whatever an argument spells, the call is read again."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from omlx_producer.protocol import GenerationRequest
from omlx_worker.engine.chat import Chat
from tests.helpers.chats import (
    ADDED,
    answer_of,
    pieces_of,
    spelled,
    syntax,
    tokenizer_of,
    vocabulary,
)

WRITTEN = [family for family in ADDED if family != "gemma4"]
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "spots": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("say", "say_more")
]
MARKERS = sorted(
    {
        *(token for tokens in ADDED.values() for token in tokens),
        *("</function>", "</param>", "</parameter>", "[TOOL_CALLS]say[ARGS]{}", ")]", "<think>"),
        *("</think>", '"', "'", "\\", "\n", "{", "}", ",", "=", "<", "a", " ", "null", "é"),
        *("</arg_value>", "\n</parameter>\n", "<parameter=text>\n", "say:0", "functions.say:0"),
    }
)
TEXTS = st.lists(st.sampled_from(MARKERS), max_size=5).map("".join)


@functools.cache
def tokens_of(family: str) -> LLTokenizer:
    return vocabulary(tokenizer_of(family, thinking=True))


def request(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "x"}]
    return GenerationRequest.parse(
        {"model": "m", "messages": messages, "tools": TOOLS, "tool_choice": "required", **fields}
    )


@functools.cache
def chat(family: str) -> Chat:
    return Chat(tokenizer_of(family, thinking=True), "m")


def tokens_and_grammar(
    family: str, calls: list[tuple[str, dict[str, Any]]]
) -> tuple[list[int], bool]:
    """The tokens of calls, and whether the grammar takes them."""
    tokenizer, written = tokenizer_of(family, thinking=True), syntax(family)
    tokens: list[int] = []
    for name, arguments in calls:
        tokens += tokenizer.encode(written.between, add_special_tokens=False) if tokens else []
        for text, is_syntax in pieces_of(written, name, arguments):
            if is_syntax:
                tokens += tokenizer.encode(text, add_special_tokens=False)
            else:
                tokens += spelled(tokenizer, text)
    constraint = chat(family).constraint(request(), None)
    assert constraint is not None
    matcher = LLMatcher(tokens_of(family), LLMatcher.grammar_from_lark(constraint.value))
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return tokens, taken


def read_again(family: str, tokens: list[int]) -> dict[str, Any]:
    """The message that a row with these tokens ends in."""
    asked = request()
    form = chat(family).form(asked, chat(family).encode(asked))
    return answer_of(tokenizer_of(family, thinking=True), form, tokens)


@pytest.mark.parametrize("family", WRITTEN)
@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["say", "say_more"]),
            st.fixed_dictionaries(
                {"text": TEXTS},
                optional={
                    "spots": st.lists(TEXTS, max_size=2),
                    "deep": st.dictionaries(TEXTS, TEXTS, max_size=1),
                },
            ),
        ),
        min_size=1,
        max_size=2,
    )
)
@example(calls=[("say", {"text": "a</tool_call>b"})])
@example(calls=[("say", {"text": "a<think>b</think>c"})])
def test_a_call_that_the_grammar_takes_is_read_as_it_was_meant(
    family: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    calls = calls if syntax(family).repeats else calls[:1]
    tokens, taken = tokens_and_grammar(family, calls)
    assume(taken)
    if family == "minicpm5":  # whose end marker is text, and may also be a part of JSON
        others = [value for _, given in calls for key, value in given.items() if key != "text"]
        assume("</function>" not in json.dumps(others))

    message = read_again(family, tokens)

    assert message["content"] is None
    assert [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ] == calls
