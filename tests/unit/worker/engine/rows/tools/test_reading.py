"""Calls in a model's text are read with mlx-lm's parsers; what is no call is none."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from omlx_producer.wire import FunctionDefinition
from omlx_worker.engine.rows.tools.reading import CallReader
from omlx_worker.engine.rows.tools.syntax import ends_of
from tests.helpers.chats import ADDED, syntax, tokenizer_of, written, written_all

WEATHER = FunctionDefinition(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "exact": {"$ref": "#/$defs/flag"},
        },
        "$defs": {"flag": {"type": ["boolean", "null"]}},
    },
)


def read(family: str, text: str) -> list[tuple[str, Any]]:
    calls = CallReader(tokenizer_of(family), [WEATHER]).read(text)
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("json_tools", '{"name": "get_weather", "arguments": {"place": "é", "days": 2}}'),
        (
            "json_tools",
            '{"name": "get_weather", "arguments": "{\\"place\\": \\"é\\", \\"days\\": 2}"}',
        ),
        ("", '{"name": "get_weather", "parameters": {"place": "é", "days": 2}}'),
        ("", '\n{"name": "get_weather", "arguments": {"place": "é", "days": 2}} '),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=place>\né\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>",
        ),
        (
            "glm47",
            "get_weather\n<arg_key>place</arg_key>\n<arg_value>é</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>",
        ),
        ("mistral", 'get_weather[ARGS]{"place": "é", "days": 2}'),
        ("gemma4", 'call:get_weather{place:<|"|>é<|"|>,days:2}'),
    ],
)
def test_a_call_is_read(family: str, text: str) -> None:
    assert read(family, text) == [("get_weather", {"place": "é", "days": 2})]


def test_one_text_may_hold_several_calls() -> None:
    text = 'get_weather[ARGS]{"days": 1}[TOOL_CALLS]get_weather[ARGS]{"days": 2}'
    assert [arguments["days"] for _, arguments in read("mistral", text)] == [1, 2]


def one(family: str, name: str = "get_weather", arguments: str = '{"days": 1}') -> str:
    """One call of a family whose texts between markers may hold several."""
    if family == "kimi_k2":
        called = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        return f"{called}{arguments}<|tool_call_end|>"
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


@pytest.mark.parametrize("family", ["kimi_k2", "mistral"])
@pytest.mark.parametrize("name", ["get_rain", "get_weather"])
@pytest.mark.parametrize("arguments", ["{}", "[1]", '{"place": NaN}', '{"place": "'])
def test_one_call_that_cannot_be_read_takes_no_other_with_it(
    family: str, name: str, arguments: str
) -> None:
    bad = one(family, name, arguments)
    expected = [("get_weather", {"days": 1}), ("get_weather", {"days": 1})]
    if (name, arguments) == ("get_weather", "{}"):
        expected.insert(1, ("get_weather", {}))
    text = one(family) + bad + one(family)
    assert read(family, text.removeprefix("[TOOL_CALLS]")) == expected


@pytest.mark.parametrize(
    "family",
    [
        *("kimi_k2", "minimax_m2", "qwen3_coder", "json_tools", "dsml", "deepseek_r1"),
        *("deepseek_v31", "seed", "command", "nemotron", "mistral_list"),
    ],
)
def test_of_a_text_that_was_cut_the_calls_with_their_own_ends_are_read(family: str) -> None:
    reader, marked = CallReader(tokenizer_of(family), [WEATHER]), syntax(family)
    form = replace(marked, start="", end="", between="")
    calls = [("get_weather", {"days": days, "place": "é"}) for days in (1, 2)]
    both, (*_, after) = written_all(form, *calls), form.section or ("", "", "")
    first = written(form, *calls[0]).removesuffix(after).rstrip("\n")

    for length in range(len(both.removesuffix(after).rstrip("\n"))):
        cut = both[:length].lstrip("\n")
        assert len(reader.read_cut(cut)) == (len(first) <= length)
    assert [call.parsed for call in reader.read_cut(both.strip())] == [each for _, each in calls]
    assert reader.read_cut("") == []


@pytest.mark.parametrize("family", ["glm47", "minicpm5", "mistral", "pythonic", "harmony"])
def test_of_a_text_that_was_cut_no_call_is_read_without_an_end_of_its_own(family: str) -> None:
    text = written(replace(syntax(family), start="", end=""), "get_weather", {"days": 12})
    assert CallReader(tokenizer_of(family), [WEATHER]).read_cut(text) == []


def test_a_start_marker_inside_a_text_begins_no_call() -> None:
    text = 'get_weather[ARGS]{"place": "[TOOL_CALLS]"}'
    assert read("mistral", text) == [("get_weather", {"place": "[TOOL_CALLS]"})]


def test_values_that_may_be_null_have_their_types() -> None:
    pair = "<parameter={}>\n{}\n</parameter>\n"
    text = "<function=get_weather>\n" + pair.format("exact", "true") + pair.format("days", "null")
    assert read("qwen3_coder", text + "</function>") == [
        ("get_weather", {"exact": True, "days": None})
    ]


def test_a_text_that_says_null_is_no_null() -> None:
    text = "<function=get_weather>\n<parameter=place>\nnull\n</parameter>\n</function>"
    assert read("qwen3_coder", text) == [("get_weather", {"place": "null"})]


def test_half_a_surrogate_pair_stays_an_escape_so_that_the_call_can_be_sent() -> None:
    text = '{"name": "get_weather", "arguments": {"place": "é \\ud83d"}}'
    (call,) = CallReader(tokenizer_of("json_tools"), [WEATHER]).read(text)
    # A test's report cannot be sent with it either.
    assert call.arguments.encode(errors="replace").decode() == '{"place": "é \\ud83d"}'


@pytest.mark.parametrize("nested", ["-", "[", "not ", "a "])
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("qwen3_coder", "<function=save>\n<parameter=o>\n{}\n</parameter>\n</function>"),
        ("minimax_m2", '<invoke name="save">\n<parameter name="o">{}</parameter>\n</invoke>'),
        ("minicpm5", '"save"><param name="o">{}</param>'),
        ("glm47", "save<arg_key>o</arg_key><arg_value>{}</arg_value>"),
        ("pythonic", "[save(o={})]"),
        ("json_tools", '{{"name": "save", "arguments": {{"o": {}}}}}'),
    ],
)
def test_a_value_that_is_nested_too_deeply_ends_no_job(family: str, call: str, nested: str) -> None:
    save = FunctionDefinition(
        name="save", parameters={"properties": {"o": {"type": "object"}, "l": {"type": "array"}}}
    )
    text = call.format(nested * 20_000 + "1")
    for found in CallReader(tokenizer_of(family), [save]).read(text):
        assert found.name == "save"


@pytest.mark.parametrize(
    ("family", "text", "times"),
    [
        ("gemma4", "call:get_weather{a", 1000),
        ("gemma4", 'call:get_weather{<|"|>', 1000),
        ("glm47", "<arg_key>o</arg_key><arg_value></arg_value>\n", 1900),
        ("json_tools", "[", 100_001),
    ],
)
def test_a_parser_gets_no_text_that_it_takes_long_to_read(
    family: str, text: str, times: int
) -> None:
    parser, tokenizer = Mock(side_effect=ValueError), tokenizer_of(family)
    with patch(f"mlx_lm.tool_parsers.{family}.parse_tool_call", parser):
        reader = CallReader(tokenizer, [WEATHER])
    assert reader.read(text * 100) == []
    assert parser.call_count == 1
    assert reader.read(text * times) == []
    assert parser.call_count == 1


@pytest.mark.parametrize("family", ["gemma4", "json_tools", "qwen3_coder"])
def test_a_long_text_is_an_argument_like_any_other(family: str) -> None:
    long = "call: x " * 10 + "é" * 90_000
    call = {
        "gemma4": f'call:get_weather{{place:<|"|>{long}<|"|>}}',
        "json_tools": f'{{"name": "get_weather", "arguments": {{"place": "{long}"}}}}',
        "qwen3_coder": f"<function=get_weather>\n<parameter=place>\n{long}\n</parameter>\n"
        "</function>",
    }
    assert read(family, call[family]) == [("get_weather", {"place": long})]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=get_weather json<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
        "<|channel|>final to=functions.get_weather<|message|>",
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        " to=get_weather<|channel|>analysis<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>\n",
    ],
)
def test_the_recipient_tells_a_call_wherever_the_header_has_it(header: str) -> None:
    arguments = {"place": "<|message|> to=functions.other é", "days": 2}
    assert read("harmony", header + json.dumps(arguments)) == [("get_weather", arguments)]
    assert read("harmony", header + '{"days": 2}') == [("get_weather", {"days": 2})]


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary<|message|>{"days": 2}',
        '<|channel|>commentary to=functions.get_rain <|constrain|>json<|message|>{"days": 2}',
        '<|channel|>commentary to=functions.get_weather_now json<|message|>{"days": 2}',
        '<|channel|>commentary to=my.get_weather json<|message|>{"days": 2}',
        '<|channel|>commentary goto=get_weather json<|message|>{"days": 2}',
        "<|channel|>analysis to=python code<|message|>print(2)",
        '<|channel|>final<|message|>to=functions.get_weather <|message|>{"days": 2}',
        "<|channel|>commentary to=functions.get_weather json<|message|>",
        '<|channel|>commentary to=functions.get_weather json<|message|>{"days": 2} {"days": 3}',
        f"<|channel|>{'to=get_weather ' * 20_000}",
    ],
)
def test_a_message_without_a_function_of_the_request_is_no_call(text: str) -> None:
    assert read("harmony", text) == []


def test_a_message_of_harmony_that_was_cut_is_no_other_call() -> None:
    whole = '<|channel|>commentary to=functions.get_weather json<|message|>{"days": 12}'
    assert [read("harmony", whole[:length]) for length in range(len(whole))] == [[]] * len(whole)


@pytest.mark.parametrize(
    "text",
    [
        'get_weather[CALL_ID]get_rain1[ARGS]{"days": 2}',
        'get_weather[CALL_ID]get_weather2[ARGS]{"days": 2}',
        'get_weather[ARGS]{"days": 2}',
        'get_weather{"days": 2}',
        ' [{"name": "get_weather", "arguments": {"days": 2}, "id": "get_rain1"}]',
        '[\n  {"id": "abcdef123", "arguments": {"days": 2}, "name": "get_weather"}\n]',
    ],
)
def test_the_name_of_a_call_of_mistral_is_never_its_id(text: str) -> None:
    rain = FunctionDefinition(name="get_rain1", parameters=None)
    calls = CallReader(tokenizer_of("mistral"), [rain, WEATHER]).read(text)
    assert [(call.name, call.parsed) for call in calls] == [("get_weather", {"days": 2})]


def test_a_call_with_an_id_may_be_followed_by_another() -> None:
    text = "[TOOL_CALLS]".join(f'get_weather[CALL_ID]a{n}[ARGS]{{"days": {n}}}' for n in (1, 2))
    assert [arguments["days"] for _, arguments in read("mistral", text)] == [1, 2]


@pytest.mark.parametrize("family", ["command", "nemotron"])
def test_a_list_may_have_any_keys_and_spaces(family: str) -> None:
    text = (
        '\n[\n    {"tool_call_id": "17", "tool_name": "get_weather", "parameters": {"days": 1}},'
        '\n {"name": "get_rain", "arguments": {}} , {"arguments": {"days": 2}, "name":'
        ' "get_weather"}\n]\n'
    )
    assert [arguments["days"] for _, arguments in read(family, text)] == [1, 2]


def test_a_call_of_another_function_takes_no_call_beside_it_along() -> None:
    def one(name: str) -> str:
        return f'<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{"days": 2}}<｜tool▁call▁end｜>'

    assert len(read("deepseek_v31", one("get_weather") + one("get_rain") + one("get_weather"))) == 2


def test_a_pair_that_tells_its_type_needs_no_schema() -> None:
    def pair(key: str, string: str, value: str) -> str:
        return f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'

    pairs = (
        pair("place", "true", "<![CDATA[5]]>")
        + pair("days", "false", "null")
        + pair("more", "false", "[1]")
    )
    text = f'<｜DSML｜invoke name="get_weather">\n{pairs}</｜DSML｜invoke>\n'
    assert read("dsml", text) == [
        ("get_weather", {"place": "<![CDATA[5]]>", "days": None, "more": [1]})
    ]
    assert read("dsml", text.replace("[1]", "one")) == []


def test_an_answer_ends_where_the_model_waits_for_a_result() -> None:
    def ends(family: str) -> list[str]:
        tokenizer = tokenizer_of(family)
        return tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))

    assert ends("seed") == ["<|eos|>"]
    assert ends("glm47") == ["<|eos|>", "<|observation|>"]
    assert ends("harmony") == ["<|eos|>", "<|call|>", "<|return|>"]


def test_the_end_of_a_message_of_harmony_ends_no_answer() -> None:
    tokenizer = copy.copy(tokenizer_of("harmony"))
    before = set(tokenizer.eos_token_ids)
    tokenizer.eos_token_ids = before | {tokenizer.get_vocab()["<|end|>"]}
    assert ends_of(tokenizer) == before


@pytest.mark.parametrize("family", ADDED)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is late.",
        '{"name": "get_weather"',
        '{"name": "get_rain", "arguments": {}}',
        '{"name": "get_weather", "arguments": [1]}',
        '{"name": "get_weather", "arguments": {"days": NaN}}',
        '[{"name": 5}]',
        "<function=get_rain>\n</function>",
        "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>",
        "[get_rain(days=5)]",
        "(" * 1000,
    ],
)
def test_what_is_no_call_of_a_function_given_is_none(family: str, text: str) -> None:
    assert read(family, text) == []
