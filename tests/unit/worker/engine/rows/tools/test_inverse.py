"""Reading is the inverse of the grammar: whatever an argument spells, the call is read again."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.rows.chat import Chat
from tests.helpers.chats import (
    ADDED,
    answer_of,
    pieces_of,
    spelled,
    syntax,
    tokenizer_of,
    vocabulary,
)

WITH_TOKENS = [(family, True) for family in ADDED if family != "gemma4"]
WITHOUT = [(family, False) for family in ("json_tools", "qwen3_coder", "minimax_m2")]
"""Families, and whether their markers are tokens; MiniCPM has none in any case."""

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
        *(
            '<function name="say">',
            "</function>",
            "</param>",
            "</parameter>",
            "[TOOL_CALLS]say[ARGS]{}",
            ")]",
            "<think>",
        ),
        *("</think>", '"', "'", "\\", "\n", "{", "}", ",", "=", "<", "a", " ", "null", "é"),
        *("</arg_value>", "\n</parameter>\n", "<parameter=text>\n", "say:0", "functions.say:0"),
        *("<TOOLCALL>", "</TOOLCALL>", "</｜DSML｜parameter>", "\n```", " to=functions.say ", "]"),
    }
)
TEXTS = st.lists(st.sampled_from(MARKERS), max_size=5).map("".join)


@functools.cache
def tokens_of(family: str, marks: bool) -> LLTokenizer:
    return vocabulary(tokenizer_of(family, thinking=True, marks=marks))


def request(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "x"}]
    return GenerationRequest.parse(
        {"model": "m", "messages": messages, "tools": TOOLS, "tool_choice": "required", **fields}
    )


@functools.cache
def chat(family: str, marks: bool) -> Chat:
    return Chat(tokenizer_of(family, thinking=True, marks=marks), "m")


def tokens_and_grammar(
    family: str, marks: bool, calls: list[tuple[str, dict[str, Any]]]
) -> tuple[list[int], bool]:
    """The tokens of calls, and whether the grammar takes them."""
    tokenizer = tokenizer_of(family, thinking=True, marks=marks)
    tokens: list[int] = []
    for text, is_syntax in pieces_of(syntax(family), *calls):
        if is_syntax:
            tokens += tokenizer.encode(text, add_special_tokens=False)
        else:
            tokens += spelled(tokenizer, text)
    constraint = chat(family, marks).constraint(request(), None)
    assert constraint is not None
    matcher = LLMatcher(tokens_of(family, marks), LLMatcher.grammar_from_lark(constraint.value))
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    return tokens, taken


def read_again(family: str, marks: bool, tokens: list[int]) -> dict[str, Any]:
    """The message that a row with these tokens ends in."""
    asked = request()
    form = chat(family, marks).reply(asked, chat(family, marks).text(asked))
    return answer_of(tokenizer_of(family, thinking=True, marks=marks), form, tokens)


@pytest.mark.parametrize(("family", "marks"), [*WITH_TOKENS, *WITHOUT])
@settings(max_examples=settings().max_examples // 2)
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
@example(
    calls=[("say", {"text": "", "spots": ["</function>", "</tool_call>"]}), ("say", {"text": ""})]
)
@example(calls=[("say", {"text": "a<think>b</think>c"})])
def test_a_call_that_the_grammar_takes_is_read_as_it_was_meant(
    family: str, marks: bool, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    calls = calls if syntax(family).repeats else calls[:1]
    tokens, taken = tokens_and_grammar(family, marks, calls)
    assume(taken)
    message = read_again(family, marks, tokens)

    assert message["content"] is None
    assert [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ] == calls


def ends_a_call(family: str, text: str) -> bool:
    """Whether a text spells the end of a value and of its call, which no reader can tell apart."""
    written = syntax(family)
    parts = [written.pairs.after if written.pairs else "", written.after, written.end]
    end = r"\s*".join(re.escape(part.strip()) for part in parts)
    return bool(written.pairs and re.search(end, text))


@pytest.mark.parametrize(("family", "marks"), [*WITH_TOKENS, *WITHOUT])
@settings(max_examples=20)
@given(text=TEXTS)
@example(text="a</parameter>b")
def test_a_free_call_is_read_as_it_was_written_or_stays_text(
    family: str, marks: bool, text: str
) -> None:
    assume(not ends_a_call(family, text))
    tokenizer, model = tokenizer_of(family, thinking=True, marks=marks), chat(family, marks)
    tokens: list[int] = []
    for piece, is_syntax in pieces_of(syntax(family), ("say", {"text": text})):
        tokens += (
            tokenizer.encode(piece, add_special_tokens=False)
            if is_syntax
            else spelled(tokenizer, piece)
        )
    asked = request(tool_choice="auto")
    message = answer_of(tokenizer, model.reply(asked, model.text(asked)), tokens)

    for call in message.get("tool_calls", ()):
        assert json.loads(call["function"]["arguments"]) == {"text": text}


SAID = '<function name="say"><param name="text">{}</param></function>'


def minicpm(text: str, *, cut: bool = False, **fields: Any) -> tuple[Any, list[Any]]:
    """The content and the arguments of calls of an answer whose markers are no tokens."""
    asked, model = request(**fields), chat("minicpm5", True)
    form, tokenizer = model.reply(asked, model.text(asked)), tokenizer_of("minicpm5")
    message = answer_of(tokenizer, form, spelled(tokenizer, text), cut=cut)
    calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return message["content"], calls


def test_a_text_that_minicpm_wraps_is_unwrapped_where_calls_are_required() -> None:
    wrapped = SAID.format("<![CDATA[a < b]]>")
    assert minicpm(wrapped) == (None, [{"text": "a < b"}])
    assert minicpm(f"{SAID.format('a')}\n{wrapped}") == (None, [{"text": "a"}, {"text": "a < b"}])


def test_a_required_call_that_was_cut_is_not_read_though_its_end_is_no_token() -> None:
    text = f"{SAID.format('a')}\n{SAID.format('b')}"
    for length in range(len(text)):
        content, calls = minicpm(text[:length], cut=True)
        assert calls == [{"text": "a"}] * (length >= len(SAID.format("a")))
        assert (content is None) == bool(calls)
    for length in range(len(SAID.format("<![CDATA[a]]>"))):
        assert minicpm(SAID.format("<![CDATA[a]]>")[:length], cut=True)[1] == []


def test_an_answer_beside_tools_may_spell_what_begins_a_call() -> None:
    answer = '{"a": "<function name=\\"say\\">", "b": "</function>"}'
    fields = {"tool_choice": "auto", "response_format": {"type": "json_object"}}
    assert minicpm(answer, **fields) == (answer, [])
