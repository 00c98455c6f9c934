"""A bad request gets one sentence that names the field, the value and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.wire import (
    MAX_PROMPT_CHARACTERS,
    GenerationRequest,
    InvalidRequest,
    Message,
    ResponseFormat,
    TextPart,
)
from omlx_producer.wire.remedy import remedy_of
from tests.helpers.requests import refusal

OK = {"model": "demo", "prompt": "x"}
DECISION = {"probabilities": True, "structured_outputs": {"choice": ["a", "b"]}}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"} | fields]}


SHAPE = 'give a JSON object such as {"model": "demo", "prompt": "def fibonacci(n):"}'
PROMPT = f"give text of 1 to {MAX_PROMPT_CHARACTERS} characters or a list of token ids"
STOP = "give a text or up to 16 texts, each of 1 to 256 characters"
MODEL = "give a model's alias, 1 to 200 letters, digits and any of . _ @ / -"
BIAS = 'give up to 1024 numbers from -100 to 100, as {"<token id>": 5}'
MESSAGES = 'give a list of messages such as {"role": "user", "content": "Hello"}'
UNICODE = "give text without lone surrogates, which are no characters"
A_TIME = 'a time such as "24h", "90m" or "30s"'
TEXT_ONLY = 'only text is generated; give ["text"] or remove it'
CONTENT = 'give text or a list of parts such as {"type": "text", "text": "Hello"}'
BAD: list[tuple[Any, str]] = [
    ([1], f"request: got [1]; {SHAPE}"),
    ("x", f"request: got 'x'; {SHAPE}"),
    (None, f"request: got None; {SHAPE}"),
    ({"prompt": "x"}, f"model: missing; {MODEL}"),
    (OK | {"model": ""}, f"model: got ''; {MODEL}"),
    (OK | {"model": "a b"}, f"model: got 'a b'; {MODEL}"),
    (OK | {"model": "a\n"}, f"model: got 'a\\n'; {MODEL}"),
    (OK | {"model": 5}, f"model: got 5; {MODEL}"),
    ({"model": "demo"}, "prompt: missing; give a prompt or messages"),
    (OK | CHAT, "prompt: given beside messages; give only one of the two"),
    (OK | {"prompt": ""}, f"prompt: got ''; {PROMPT}"),
    (OK | {"cache_salt": ""}, "cache_salt: got ''; give a text of 1 to 256 characters"),
    (
        OK | {"cache_salt": "x" * 257},
        "cache_salt: got 257 characters; give a text of 1 to 256 characters",
    ),
    (OK | {"cache_salt": 5}, "cache_salt: got 5; give a text of 1 to 256 characters"),
    (OK | {"stop": "x" * 257}, f"stop: got 257 characters; {STOP}"),
    (OK | {"prompt": []}, f"prompt: got []; {PROMPT}"),
    (OK | {"prompt": 5}, f"prompt: got 5; {PROMPT}"),
    (
        OK | {"prompt": ["a", "b"]},
        "prompt: got a list of 2 prompts; give each a request of its own",
    ),
    (OK | {"prompt": [1, "a"]}, f"prompt[1]: got 'a'; {PROMPT}"),
    (OK | {"prompt": [1, -1]}, f"prompt[1]: got -1; {PROMPT}"),
    (OK | {"prompt": [2**31]}, f"prompt[0]: got 2147483648; {PROMPT}"),
    (OK | {"prompt": [True]}, f"prompt[0]: got True; {PROMPT}"),
    (OK | {"prompt": "\ud800"}, f"prompt: got '\\ud800'; {UNICODE}"),
    (message(content="\ud800"), f"messages[0].content: got '\\ud800'; {UNICODE}"),
    (message(name="\ud800"), f"messages[0].name: got '\\ud800'; {UNICODE}"),
    (
        message(content=[{"type": "text", "text": "\ud800"}]),
        f"messages[0].content[0].text: got '\\ud800'; {UNICODE}",
    ),
    (OK | {"stop": "\ud800"}, f"stop: got '\\ud800'; {UNICODE}"),
    (CHAT | {"messages": []}, f"messages: got []; {MESSAGES}"),
    (CHAT | {"messages": "hi"}, f"messages: got 'hi'; {MESSAGES}"),
    (CHAT | {"messages": ["hi"]}, f"messages[0]: got 'hi'; {MESSAGES}"),
    (message(content=""), "messages: none has any text; give at least one with text"),
    (message(content=5), f"messages[0].content: got 5; {CONTENT}"),
    (message(content=["a"]), f"messages[0].content[0]: got 'a'; {CONTENT}"),
    (
        message(role="robot"),
        "messages[0].role: got 'robot'; give one of system, developer, user, assistant and tool",
    ),
    (message(name=3), "messages[0].name: got 3; give text"),
    (message(nmae="a"), "messages[0].nmae: unknown field; did you mean name?"),
    (message(content=None), f"messages[0].content: got None; {CONTENT}"),
    (
        message(role="tool"),
        "messages[0].tool_call_id: missing; give the id of the call that the message answers",
    ),
    (
        message(role="assistant", tool_calls=[{}]),
        "messages[0].tool_calls[0].id: missing; give text",
    ),
    (
        message(function_call={}),
        "messages[0].function_call: no longer OpenAI's; give tool_calls instead",
    ),
    (
        message(content=[{"type": "image", "text": "a"}]),
        'messages[0].content[0].type: got \'image\'; give "text" or "image_url"',
    ),
    (
        message(content=[{"type": "text"}]),
        "messages[0].content[0].text: missing; give text",
    ),
    (
        OK | {"max_completion_tokens": 0},
        "max_completion_tokens: got 0 without prompt_logprobs; give a whole number of at least 1",
    ),
    (
        OK | {"max_tokens": 0, "logprobs": 1},
        "max_tokens: got 0 without prompt_logprobs; give a whole number of at least 1",
    ),
    (
        OK | {"max_tokens": 0},
        "max_tokens: got 0 without prompt_logprobs; give a whole number of at least 1",
    ),
    (OK | {"max_tokens": 1.5}, "max_tokens: got 1.5; give a whole number from 1 to 2147483647"),
    (
        OK | {"max_tokens": 1, "max_completion_tokens": 1},
        "max_tokens: given beside max_completion_tokens, the same setting; give one",
    ),
    (OK | {"temperature": 2.1}, "temperature: got 2.1; give a number from 0 to 2"),
    (OK | {"temperature": "1"}, "temperature: got '1'; give a number from 0 to 2"),
    (OK | {"temperature": float("nan")}, "temperature: got nan; give a number from 0 to 2"),
    (OK | {"temprature": 1}, "temprature: unknown field; did you mean temperature?"),
    (OK | {"usr": "me"}, "usr: unknown field; remove it"),
    (OK | {"schema": {}}, "schema: unknown field; give response_format"),
    (OK | {"choice": ["a"]}, "choice: unknown field; give structured_outputs.choice"),
    (OK | {"regex": "a"}, "regex: unknown field; give structured_outputs.regex"),
    (OK | {"end_loops": True}, "end_loops: unknown field; give repetition_detection"),
    (OK | {"turns": []}, "turns: unknown field; remove it"),
    (message(generate=True), "messages[0].generate: unknown field; remove it"),
    (
        OK | {"functions": [{}]},
        "functions: no longer OpenAI's; give tools and tool_choice instead",
    ),
    (OK | {"modalities": ["text", "audio"]}, f"modalities: {TEXT_ONLY}"),
    (OK | {"a\nb": 1}, "'a\\nb': unknown field; remove it"),
    (OK | {"top_p": 0}, "top_p: got 0; give a number above 0 and up to 1"),
    (OK | {"completion_window": "0h"}, f"completion_window: got '0h'; give {A_TIME}"),
    (OK | {"completion_window": "0.0s"}, f"completion_window: got '0.0s'; give {A_TIME}"),
    (OK | {"top_k": -1}, "top_k: got -1; give a whole number from 0 to 2147483647"),
    (OK | {"top_k": 2**31}, "top_k: got 2147483648; give a whole number from 0 to 2147483647"),
    (OK | {"min_p": 1.1}, "min_p: got 1.1; give a number from 0 to 1"),
    (
        OK | {"repetition_detection": {"max_pattern_size": 3}},
        "repetition_detection.min_count: got 0; give at least 2, or max_pattern_size 0 to detect "
        "nothing",
    ),
    (
        OK | {"repetition_detection": {"min_pattern_size": 4, "max_pattern_size": 3}},
        "repetition_detection.min_pattern_size: got 4; give at most max_pattern_size",
    ),
    (
        OK | {"repetition_detection": {"max_pattern_size": 5000, "min_count": 2}},
        "repetition_detection.max_pattern_size: got 5000; give a whole number from 0 to 1024",
    ),
    (
        OK | {"thinking_token_budget": 5},
        "thinking_token_budget: given with a prompt; give messages instead",
    ),
    (
        CHAT | {"thinking_token_budget": -2},
        "thinking_token_budget: got -2; give a whole number of at least 0, or -1 for no limit",
    ),
    (
        CHAT | {"reasoning": {"max_tokens": 5}, "thinking_token_budget": 5},
        "reasoning.max_tokens: given beside thinking_token_budget, the same setting; give one",
    ),
    (
        CHAT | {"reasoning": {"exclude": True}},
        "reasoning.exclude: unknown field; give max_tokens or effort",
    ),
    (CHAT | {"reasoning": 5}, 'reasoning: got 5; give an object such as {"max_tokens": 2000}'),
    (
        OK | {"repetition_penalty": 0},
        "repetition_penalty: got 0; give a number above 0 and up to 10",
    ),
    (OK | {"presence_penalty": 3}, "presence_penalty: got 3; give a number from -2 to 2"),
    (OK | {"frequency_penalty": -3}, "frequency_penalty: got -3; give a number from -2 to 2"),
    (OK | {"logit_bias": {"1": 101}}, f"logit_bias.'1': got 101; {BIAS}"),
    (OK | {"logit_bias": {1: 101}}, f"logit_bias.'1': got 101; {BIAS}"),
    (OK | {"logit_bias": []}, f"logit_bias: got []; {BIAS}"),
    (
        OK | {"logit_bias": {"x": 1}},
        "logit_bias: got the key 'x'; give token ids as keys, as in '42'",
    ),
    (
        OK | {"logit_bias": {"01": 1}},
        "logit_bias: got the key '01'; give token ids as keys, as in '42'",
    ),
    (
        OK | {"logit_bias": {"9" * 5000: 1}},
        f"logit_bias: got the key '{'9' * 40}'; give token ids as keys, as in '42'",
    ),
    (OK | {"stop": ""}, f"stop: got ''; {STOP}"),
    (OK | {"stop": 5}, f"stop: got 5; {STOP}"),
    (OK | {"stop": ["a", ""]}, f"stop[1]: got ''; {STOP}"),
    (OK | {"stop_token_ids": [-1]}, "stop_token_ids[0]: got -1; give a list of up to 16 token ids"),
    (OK | {"draft_depth": 9}, "draft_depth: got 9; give a whole number from 0 to 8"),
    (OK | {"ignore_eos": 1}, "ignore_eos: got 1; give true or false"),
    (OK | {"seed": 2**63}, "seed: got 9223372036854775808; give a whole number that fits 64 bits"),
    (OK | {"n": 0}, "n: got 0; give a whole number from 1 to 128"),
    (OK | {"n": 129}, "n: got 129; give a whole number from 1 to 128"),
    (CHAT | {"logprobs": 5}, "logprobs: got 5; give true or false"),
    (OK | {"logprobs": 21}, "logprobs: got 21; give a whole number from 0 to 20"),
    (
        OK | {"top_logprobs": 3},
        "top_logprobs: got 3 without logprobs; give logprobs too",
    ),
    (
        OK | {"logprobs": True, "top_logprobs": 21},
        "top_logprobs: got 21; give a whole number from 0 to 20",
    ),
    (OK | {"stream": "yes"}, "stream: got 'yes'; give true or false"),
    (
        OK | {"chat_template_kwargs": [1]},
        'chat_template_kwargs: got [1]; give a JSON object such as {"enable_thinking": false}',
    ),
]


BAD += [
    (
        OK | {"prompt_logprobs": 21},
        "prompt_logprobs: got 21; give a whole number from 0 to 20",
    ),
    (
        OK | {"prompt_logprobs": 0, "stream": True},
        "prompt_logprobs: comes with the whole result; give stream: false",
    ),
    (
        OK | {"echo": True, "stream": True},
        "echo: comes with the whole result; give stream: false",
    ),
    (
        OK | {"probabilities": True},
        "probabilities: given without choices; give a choice of texts too",
    ),
    (
        OK | DECISION | {"structured_outputs": {"choice": [str(n) for n in range(129)]}},
        "structured_outputs.choice: got 129 texts beside probabilities; give at most 128",
    ),
    *(
        (
            OK | DECISION | {name: value},
            f"{name}: given beside probabilities, for which no text is generated; leave it out",
        )
        for name, value in (("n", 2), ("stream", True), ("logprobs", True), ("echo", True))
    ),
    (CHAT | {"echo": True}, "echo: given with messages; give a prompt instead"),
    *(
        (
            OK | scores | {"n": 2},
            f"n: got 2 beside {field}, which scores the prompt once; give 1, and ask for choices "
            "in a request of their own",
        )
        for field, scores in (
            ("prompt_logprobs", {"prompt_logprobs": 0, "max_tokens": 0}),
            ("prompt_logprobs", {"prompt_logprobs": 20}),
            ("echo", {"echo": True, "logprobs": 3}),
        )
    ),
    (
        OK | {"seed": 10**5000},
        "seed: got a huge whole number; give a whole number that fits 64 bits",
    ),
    (
        OK | {"chat_template_kwargs": {"a": float("inf")}},
        "chat_template_kwargs: cannot be sent as JSON "
        "(Out of range float values are not JSON compliant); change it",
    ),
    (
        OK | {"chat_template_kwargs": {"a": "\ud800"}},
        "chat_template_kwargs: cannot be sent as JSON ('utf-8' codec can't encode character "
        "'\\ud800' in position 6: surrogates not allowed); change it",
    ),
]


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [
        ({}, None),
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0),
        ({"prompt_logprobs": 0, "max_tokens": 0}, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 5),
    ],
)
def test_a_prompt_is_scored_on_request(fields: dict[str, Any], alternatives: int | None) -> None:
    assert GenerationRequest.parse(OK | fields).scored_alternatives == alternatives


@pytest.mark.parametrize(("data", "sentence"), BAD, ids=[sentence[:50] for _, sentence in BAD])
def test_a_bad_request_is_refused_in_one_sentence(data: Any, sentence: str) -> None:
    assert refusal(data) == sentence


def test_every_field_is_refused_with_its_own_remedy() -> None:
    for name, field in GenerationRequest.model_fields.items():
        sentence = refusal({"model": "demo"} | ({} if name == "messages" else OK) | {name: {1j}})
        assert sentence.startswith(f"{name}: got {{1j}}; give "), sentence
        assert sentence.endswith(remedy_of(field))


@pytest.mark.parametrize("model", [Message, TextPart, ResponseFormat])
def test_every_inner_field_says_what_it_should_hold(model: Any) -> None:
    assert all(map(remedy_of, model.model_fields.values()))


def test_a_request_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    said = "chat_template_kwargs: got more than 100 levels; give at most 100"
    assert refusal(OK | {"chat_template_kwargs": deep}) == said
    for _ in range(4900):
        deep = deep["a"]
    assert refusal(OK | {"chat_template_kwargs": deep}) == said
    assert GenerationRequest.parse(OK | {"chat_template_kwargs": deep["a"]})


def test_a_huge_value_is_not_repeated() -> None:
    assert len(refusal(OK | {"prompt": [0] * 500 + ["x" * 10_000]})) < 200
    assert len(refusal(OK | {"x" * 10_000: 1})) < 200
    assert len(refusal(OK | {"stop": ["y" * 10_000]})) < 200


def test_a_prompt_and_messages_have_the_same_longest_length() -> None:
    text = "x" * (MAX_PROMPT_CHARACTERS + 1)
    assert refusal(OK | {"prompt": text}) == f"prompt: got {len(text)} characters; {PROMPT}"
    assert refusal(message(content=text)) == (
        f"messages: got {len(text)} characters; give at most {MAX_PROMPT_CHARACTERS}"
    )


def test_too_many_logit_biases_are_refused() -> None:
    biases = {str(key): 1 for key in range(1025)}
    assert refusal(OK | {"logit_bias": biases}).startswith("logit_bias: got {'0': 1, ")


@given(
    st.dictionaries(
        st.sampled_from([*GenerationRequest.model_fields, "max_tokens", "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_anything_is_either_taken_or_refused_in_one_line(data: dict[str, Any]) -> None:
    try:
        request = GenerationRequest.parse(data)
    except InvalidRequest:
        sentence = refusal(data)
        assert sentence.isprintable()
        assert ": " in sentence
        assert len(sentence) < 400
    else:
        assert GenerationRequest.parse(json.loads(json.dumps(request.to_wire()))) == request


@pytest.mark.parametrize("depth", [0, 8])
def test_a_request_may_limit_drafts_to_any_depth_of_lookups(depth: int) -> None:
    assert GenerationRequest.parse(OK | {"draft_depth": depth}).draft_depth == depth


def test_a_request_travels_without_its_defaults() -> None:
    request = GenerationRequest.parse(OK | {"max_tokens": 5, "temperature": 1, "stop": "a"})
    assert request.to_wire() == OK | {
        "max_completion_tokens": 5,
        "temperature": 1.0,
        "stop": "a",
    }
    assert request.stop_strings == ["a"]


def test_a_message_of_parts_has_their_text() -> None:
    request = GenerationRequest.parse(
        message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    )
    assert request.messages is not None
    assert request.messages[0].text == "ab"


def test_openrouters_reasoning_is_a_budget_and_an_effort() -> None:
    request = GenerationRequest.parse(CHAT | {"reasoning": {"max_tokens": 200, "effort": "low"}})
    assert (request.thinking_token_budget, request.reasoning_effort) == (200, "low")
