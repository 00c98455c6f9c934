"""Calls that hold pairs of texts are read as they were written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx_producer.wire import FunctionDefinition
from omlx_worker.engine.rows.tools.reading import CallReader
from tests.helpers.chats import PAIRED, syntax, tokenizer_of, written

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "id": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "sure": {"type": "boolean"},
        "deep": {"type": "array"},
        "any": {},
    },
}
FUNCTIONS = [
    FunctionDefinition(name=name, parameters=PARAMETERS) for name in ("save", "save_all", "unknown")
]
BIG = 1234567890123456789


def read(family: str, text: str) -> list[tuple[str, Any]]:
    for marker in (syntax(family).start, syntax(family).end):
        text = text.removeprefix(marker).removesuffix(marker)
    calls = CallReader(tokenizer_of(family), FUNCTIONS).read(text.strip("\n"))
    return [(call.name, json.loads(call.arguments)) for call in calls]


def loosely(family: str, text: str) -> str:
    """The same call in other words, which are mlx-lm's to read."""
    if family == "glm47":
        return text.replace("<arg_value>", "\n<arg_value>")
    return text.replace('name="', 'name= "').replace("\n", "")


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"id": BIG, "ratio": BIG, "sure": True},
        {"id": -BIG, "ratio": 0.1, "deep": [BIG, {"a": None}]},
        {"text": "  indented\n\n    twice\n", "note": " "},
        {"text": "", "note": None, "ratio": None},
        {"text": "null", "sure": False},
        {"text": '{"a": 1}', "note": "<p>5</p>"},
    ],
)
@pytest.mark.parametrize("name", ["save", "save_all"])
def test_arguments_are_what_was_written(family: str, name: str, arguments: dict[str, Any]) -> None:
    assert read(family, written(syntax(family), name, arguments)) == [(name, arguments)]


@pytest.mark.parametrize("family", PAIRED)
def test_numbers_keep_their_digits_however_a_call_is_written(family: str) -> None:
    arguments = {"id": BIG, "ratio": BIG + 2, "text": "5"}
    text = loosely(family, written(syntax(family), "save", arguments))
    assert read(family, text) == [("save", arguments)]
    text = loosely(family, written(syntax(family), "save", {"ratio": None}))
    assert read(family, text) == [("save", {"ratio": None})]


@pytest.mark.parametrize("family", PAIRED)
def test_a_marker_inside_json_ends_nothing(family: str) -> None:
    pairs = syntax(family).pairs
    assert pairs is not None
    arguments = {"deep": [f"a{pairs.after.strip()}b", syntax(family).after.strip()], "id": 1}
    assert read(family, written(syntax(family), "save", arguments)) == [("save", arguments)]


@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2"])
def test_one_section_may_hold_several_calls(family: str) -> None:
    def inner(**arguments: Any) -> str:
        text = written(syntax(family), "save", arguments)
        return text.removeprefix(syntax(family).start).removesuffix(syntax(family).end)

    for first in ({"id": 1}, {"any": "x"}):
        text = inner(**first) + inner(text="a", sure=True)
        assert read(family, text) == [("save", first), ("save", {"text": "a", "sure": True})]


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize("value", ["a{end}b", "a{end}", "{end}", "a{end}{after}b", "a{end}{text}b"])
@pytest.mark.parametrize("other", [{}, {"any": 1}], ids=["exactly", "by the parser"])
def test_a_call_whose_text_holds_the_end_of_a_pair_is_none(
    family: str, value: str, other: dict[str, Any]
) -> None:
    form = syntax(family)
    assert form.pairs is not None
    begin = form.pairs.before.replace("{key}", "text")
    text = value.format(end=form.pairs.after, after=form.after, text=begin)
    assert read(family, written(form, "save", {"text": text} | other)) == []


def test_the_first_of_two_calls_in_one_text_may_be_a_call_that_was_cut() -> None:
    form = syntax("qwen3_coder")
    text = written(form, "save", {"text": "a\n</parameter>\n</function>\nb"})
    reader = CallReader(tokenizer_of("qwen3_coder"), FUNCTIONS)
    assert reader.read_cut(text.removeprefix(form.start).removesuffix(form.end)) == []


def test_a_wrapped_text_is_unwrapped() -> None:
    text = written(syntax("minicpm5"), "save", {"text": "<![CDATA[a < b]]>"})
    assert read("minicpm5", text) == [("save", {"text": "a < b"})]


@pytest.mark.parametrize("family", PAIRED)
def test_a_value_that_may_have_several_types_is_left_to_the_parser(family: str) -> None:
    [(name, arguments)] = read(family, written(syntax(family), "save", {"any": "x", "id": 5}))
    assert (name, arguments) == ("save", {"any": "x", "id": 5})


@pytest.mark.parametrize("family", PAIRED)
@pytest.mark.parametrize("end", ["tr", "true"])
def test_a_call_whose_last_pair_has_no_end_is_none(family: str, end: str) -> None:
    whole = written(syntax(family), "save", {"id": 1, "sure": True})
    assert read(family, whole[: whole.index("true")] + end) == []
