"""Thinking and answers of each family are told apart, whole, as they come and under a schema."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from omlx_producer.wire import GenerationRequest
from omlx_producer.wire.markup import StreamedReply
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.text import RowText
from omlx_worker.engine.rows.thinking import Thoughts
from tests.helpers.chats import answer_of, spelled
from tests.helpers.forms import ANSWER, FORMS, HARMONY, THOUGHT, Written

SCHEMA = {"type": "object", "properties": {"it": {"type": "string"}}}
AS_JSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
}

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def request(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "What do <think> and </think> do?"}]
    return GenerationRequest.parse({"model": "m", "messages": messages, **fields})


def reply_of(form: Written, asked: GenerationRequest) -> ReplyForm | None:
    chat = Chat(form.tokenizer, "m")
    return chat.reply(asked, chat.text(asked))


def tokens_of(form: Written, text: str) -> list[int]:
    return list(form.tokenizer.encode(text, add_special_tokens=False))


@each_form
def test_thinking_and_answer_are_told_apart(form: Written) -> None:
    tokens = tokens_of(form, form.written())
    message = answer_of(form.tokenizer, reply_of(form, request()), tokens)
    assert message["content"] == ANSWER
    assert message.get("reasoning_content", "") == form.reasoning


@each_form
def test_a_stream_tells_the_same_and_never_a_part_of_a_marker(form: Written) -> None:
    found = reply_of(form, request())
    if found is None:
        assert form == FORMS["none"]
        return
    tokens = tokens_of(form, form.written())
    follows = RowText(
        RowRequest("j:0", [1], len(tokens) + 1, Sampling(), reply=found), form.tokenizer
    )
    streamed, said = StreamedReply(found.markup), {"content": "", "reasoning": ""}
    marked = 0
    for count, token in enumerate(tokens, 1):
        text = follows.feed(token).text
        fresh, marked = follows.marks[marked:], len(follows.marks)
        for span, added in streamed.feed(text, [mark.offset for mark in fresh]):
            said[span.part] += added
        assert ANSWER.startswith(said["content"]), count
        assert form.reasoning.startswith(said["reasoning"]), count
        # An answer that was cut here.
        message = answer_of(form.tokenizer, found, tokens[:count], cut=True)
        assert ANSWER.startswith(message["content"].strip("\n"))
    assert said["reasoning"] == form.reasoning


@each_form
def test_a_schema_holds_for_the_answer_and_leaves_the_thinking(form: Written) -> None:
    asked = request(**AS_JSON)
    chat = Chat(form.tokenizer, "m")
    constraint = chat.constraint(asked, chat.reply(asked, chat.text(asked)))
    assert constraint is not None
    grammar = Grammars(form.tokenizer, len(form.tokenizer)).compile(constraint)

    def takes(text: str) -> bool:
        matcher: LLMatcher = grammar.start.deep_copy()
        tokens = tokens_of(form, text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    assert takes(form.written())
    assert not takes(form.written('{"it": 3}'))
    assert not takes(form.written("It is."))
    assert not takes("It is.")


def test_the_answer_under_a_schema_is_all_that_the_user_is_told() -> None:
    form = FORMS["harmony"]
    chat, asked = Chat(form.tokenizer, "m"), request(**AS_JSON)
    constraint = chat.constraint(asked, chat.reply(asked, chat.text(asked)))
    assert constraint is not None
    matcher = Grammars(form.tokenizer, len(form.tokenizer)).compile(constraint).start.deep_copy()
    tokens = tokens_of(form, "<|channel|>commentary<|message|>")
    assert matcher.try_consume_tokens(tokens) < len(tokens)


@pytest.mark.parametrize("form", [FORMS["hunyuan"], FORMS["granite 3.3"], FORMS["olmo 3"]])
def test_an_answer_may_speak_of_markers_that_no_token_writes(form: Written) -> None:
    answer = '{"it": "<think> begins a thought, <answer> or <response> an answer"}'
    tokens, asked = tokens_of(form, form.written(answer)), request()
    chat = Chat(form.tokenizer, "m")
    found = chat.reply(asked, chat.text(asked))
    message = answer_of(form.tokenizer, found, tokens)
    assert (message["content"], message["reasoning_content"]) == (answer, form.reasoning)
    held = chat.thinking(asked, found, 1000)
    assert held is not None
    assert not Thoughts(held, tokens).on
    assert Thoughts(held, tokens).tokens == Thoughts(held, tokens_of(form, form.written())).tokens


@each_form
def test_tokens_of_thinking_are_counted_and_end_at_the_budget(form: Written) -> None:
    asked, chat = request(), Chat(form.tokenizer, "m")
    found = chat.reply(asked, chat.text(asked))
    counted = chat.thinking(asked, found, None)
    if counted is None:
        assert form == FORMS["none"]
        return
    tokens = tokens_of(form, form.written())
    thoughts = Thoughts(counted, tokens)
    assert not thoughts.on
    # A token a byte: line ends beside markers count, too, and none that joins two messages.
    said = tokens_of(form, form.reasoning)
    assert len(said) - 1 <= thoughts.tokens <= len(said) + 4
    budgeted = chat.thinking(asked, found, 10)
    assert budgeted is not None
    held, written = Thoughts(budgeted), list[int]()
    for token in tokens * 2:
        forced = held.forced
        written.append(token if forced is None else forced)
        held.feed(written[-1])
        if forced is not None and held.forced is None:
            break
    else:
        assert not form.thinks
        return
    message = answer_of(form.tokenizer, found, [*written, *tokens_of(form, "so")])
    assert message["content"] == "so"
    assert held.tokens == 10


def test_thinking_that_begins_again_after_its_budget_ends_with_an_answer() -> None:
    form = FORMS["harmony"]
    chat, asked = Chat(form.tokenizer, "m"), request(tools=[F])
    thinking = chat.thinking(asked, chat.reply(asked, chat.text(asked)), 3)
    assert thinking is not None
    held, written = Thoughts(thinking), list[int]()
    # A model that thinks on wherever it may.
    wanted = tokens_of(form, "<|channel|>analysis<|message|>Hm, well.")
    coming = list(wanted)
    while len(written) < 60:
        written.append(coming.pop(0) if held.forced is None else held.forced)
        coming = coming if held.forced is None else list(wanted)
        held.feed(written[-1])
    text = form.tokenizer.decode(written)
    assert text.startswith("<|channel|>analysis<|message|>Hm,<|end|><|start|>assistant"), (
        "a call may follow"
    )
    assert "<|start|>assistant<|channel|>final<|message|>" in text


def test_a_marker_counts_only_where_its_token_writes_it() -> None:
    form = FORMS["qwen 3"]
    found = reply_of(form, request())
    tokens = [*spelled(form.tokenizer, "<think>a</think>b")]
    assert answer_of(form.tokenizer, found, tokens)["content"] == "<think>a</think>b"


def test_a_text_without_a_header_is_the_answer() -> None:
    form = FORMS["harmony"]
    found = reply_of(form, request())
    for text in ("It is.", "It is. " * 200):
        assert answer_of(form.tokenizer, found, tokens_of(form, text))["content"] == text


def test_what_commentary_tells_the_user_is_content() -> None:
    form = FORMS["harmony"]
    text = (
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is."
    )
    message = answer_of(form.tokenizer, reply_of(form, request()), tokens_of(form, text))
    assert message["content"] == "I look.\nIt is."


def test_a_vocabulary_alone_makes_nobody_think() -> None:
    form = Written("assistant\n", "ANSWER", HARMONY[:3])
    assert reply_of(form, request()) is None
    assert THOUGHT not in form.written()


F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
QWEN = Written(
    "assistant\n<think>\n",
    "",
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    family="json_tools",
)
GLM = Written(
    "<think>",
    "",
    (*QWEN.tokens, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    family="glm47",
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        (
            FORMS["harmony"],
            f"{ANALYSIS}<|channel|>commentary to=functions.f <|constrain|>json"
            '<|message|>{"a": 1}',
            ("", "Hm.", ["f"]),
        ),
        (
            FORMS["harmony"],
            ' to=functions.f<|channel|>analysis code<|message|>{"a": 1}',
            ("", "", ["f"]),
        ),
        (
            FORMS["harmony"],
            f'{ANALYSIS}<|channel|>analysis to=f<|message|>{{"a": 1}}<|end|>',
            ("", "Hm.", ["f"]),
        ),
        (
            FORMS["harmony"],
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f json<|message|>{"a": 1}',
            ("I look.", "", ["f"]),
        ),
        (QWEN, f"Hm.\n</think>\n\n{CALL}", ("", "Hm.", ["f"])),
        (QWEN, f"Hm.\n{CALL}", ("", "Hm.", ["f"])),
        (
            QWEN,
            "Is <tool_call> needed?\n</think>\n\nNo.",
            ("No.", "Is <tool_call> needed?", []),
        ),
        (
            GLM,
            "I may use <tool_call>f here.</think>No.",
            ("No.", "I may use <tool_call>f here.", []),
        ),
        (
            GLM,
            "Hm.<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            ("", "Hm.", ["f"]),
        ),
    ],
)
def test_calls_are_told_from_thinking_and_from_talk_of_calls(
    form: Written, text: str, message: tuple[str, str, list[str]]
) -> None:
    asked = request(tools=[F])
    told = answer_of(form.tokenizer, reply_of(form, asked), tokens_of(form, text))
    calls = [call["function"] for call in told.get("tool_calls", [])]
    names = [call["name"] for call in calls]
    assert (told["content"] or "", told.get("reasoning_content", ""), names) == message
    assert all(call["arguments"] == '{"a": 1}' for call in calls)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>analysis to=functions.f code",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary json",
    ],
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_by_any_header_are_held_to_their_schemas(header: str, choice: str) -> None:
    form = FORMS["harmony"]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    asked = request(tools=[{"type": "function", "function": function}], tool_choice=choice)
    chat = Chat(form.tokenizer, "m")
    constraint = chat.constraint(asked, chat.reply(asked, chat.text(asked)))
    assert constraint is not None
    grammar = Grammars(form.tokenizer, len(form.tokenizer)).compile(constraint)

    def takes(text: str) -> bool:
        matcher, tokens = grammar.start.deep_copy(), tokens_of(form, text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    assert takes(f'{ANALYSIS}{header}<|message|>{{"a": 1}}')
    assert not takes(f'{ANALYSIS}{header}<|message|>{{"a": "1"}}')
    assert takes(f"{ANALYSIS}<|channel|>final<|message|>So.") == (choice == "auto")


def test_a_required_call_that_the_grammar_takes_is_read() -> None:
    form = FORMS["hunyuan"]
    chat, asked = Chat(form.tokenizer, "m"), request(tools=[F], tool_choice="required")
    found = chat.reply(asked, chat.text(asked))
    constraint = chat.constraint(asked, found)
    assert constraint is not None
    grammar = Grammars(form.tokenizer, len(form.tokenizer)).compile(constraint)
    call = '{"name": "f", "arguments": {"a": 1}}'
    for text in (call, f"<think>\nHm.\n</think>\n{call}", f"<answer>\n{call}\n</answer>"):
        matcher, tokens = grammar.start.deep_copy(), tokens_of(form, text)
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        read = "tool_calls" in answer_of(form.tokenizer, found, tokens)
        assert taken == read == ("<answer>" not in text)


def test_a_call_without_tools_is_not_what_the_user_reads() -> None:
    form = FORMS["harmony"]
    text = "<|channel|>analysis to=python code<|message|>1 + 1<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>2"
    told = answer_of(form.tokenizer, reply_of(form, request()), tokens_of(form, text))
    assert (told["content"], told["reasoning_content"]) == ("2", "1 + 1")
