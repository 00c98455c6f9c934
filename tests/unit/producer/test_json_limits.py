"""The number of JSON values in a request is limited, and counted before any is built."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from omlx_producer.wire import GenerationRequest, InvalidRequest, json_limits
from omlx_producer.wire.json_limits import MAX_VALUES, read_json

TEXTS = ["", "a", '"', "\\", '\\"', "[{:,", "\n", "ä\u2c22", "\\\\\\", "x" * 9]
USER = {"role": "user"}


def value(random: Random, levels: int) -> Any:
    """Any value of JSON."""
    kind = random.randrange(5 if levels else 3)
    if kind == 3:
        return [value(random, levels - 1) for _ in range(random.randrange(5))]
    if kind == 4:
        return {random.choice(TEXTS): value(random, levels - 1) for _ in range(random.randrange(5))}
    return random.choice(TEXTS) if kind else random.choice([1, -2.5, None, True])


def marks(value: Any) -> int:
    """Its lists, objects, members and texts, of which each member has one more."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(marks, value))
    return 1 + sum(2 + marks(each) for each in value.values()) if isinstance(value, dict) else 0


def test_what_is_counted_is_what_is_outside_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_limits, "MAX_VALUES", 0)
    random = Random(49)
    for _ in range(300):
        monkeypatch.setattr(json_limits, "_BLOCK", random.randint(1, 9))
        given = [value(random, 4)]
        text = json.dumps(given, ensure_ascii=False)
        monkeypatch.setattr(json_limits, "_MOST_MARKS", marks(given))
        assert read_json(text) == given
        monkeypatch.setattr(json_limits, "_MOST_MARKS", marks(given) - 1)
        with pytest.raises(InvalidRequest, match="holds more than"):
            read_json(text)


@pytest.mark.parametrize("item", ["[]", "{}", '"ab"', '{"a":1}', "[1]"])
def test_a_text_of_very_many_values_is_refused_before_it_is_read(
    item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json, "loads")
    with pytest.raises(InvalidRequest, match=r"^request: holds more than 100000 values beside its"):
        read_json(f"[{','.join([item] * (5 * MAX_VALUES))}]")


def test_a_text_of_more_numbers_than_a_prompt_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(json, "loads")
    with pytest.raises(InvalidRequest, match=r"^request: holds more than 8100000 values; shorten"):
        read_json(f"[{'1,' * 8_100_001}1]")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER | {"content": [1] * MAX_VALUES}]},
        {"messages": [USER | {"content": "x"}] * (MAX_VALUES // 3)},
        {"prompt": "x", "user": [[1] * 1000] * 101},
        {"prompt": "x", "chat_template_kwargs": {"prompt": [1] * MAX_VALUES}},
        {"prompt": "x"} | {f"f{number}": 1 for number in range(MAX_VALUES)},
    ],
)
def test_a_request_of_very_many_values_is_refused(fields: dict[str, Any]) -> None:
    sentence = "request: holds more than 100000 values beside its prompt; shorten it"
    with pytest.raises(InvalidRequest, match=f"^{sentence}$"):
        GenerationRequest.parse({"model": "demo", **fields})
    with pytest.raises(ValidationError, match=sentence):
        GenerationRequest(**({"model": "demo"} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER | {"content": [1] * 1000}]},
        {"messages": [USER | {"content": [{"type": "text"}] * 1000}]},
        {"messages": [1] * 1000},
        {"messages": [USER | {"content": "x", "tool_calls": [1] * 1000}]},
        {"messages": [USER | {"content": "x"}], "tools": [1] * 1000},
        {"prompt": "x", "stop": [1] * 1000},
        {"prompt": "x", "stop_token_ids": ["x"] * 1000},
        {"prompt": "x", "structured_outputs": {"choice": [1] * 1000}},
        {"prompt": ["x", *[1] * 1000]},
    ],
)
def test_validation_makes_no_error_of_each_wrong_item(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerationRequest.model_validate({"model": "demo"} | fields)
    assert caught.value.error_count() < 5


def test_a_long_prompt_of_tokens_is_none_of_the_values() -> None:
    text = json.dumps({"model": "demo", "prompt": [7] * (MAX_VALUES + 1)})
    assert GenerationRequest.parse(read_json(text)).prompt == [7] * (MAX_VALUES + 1)


@pytest.mark.parametrize("field", ["json", "arguments"])
def test_a_text_of_json_in_a_request_is_read_alike(field: str) -> None:
    many = f"[{','.join(['[]'] * (5 * MAX_VALUES))}]"
    fields: dict[str, Any] = {"prompt": "x", "structured_outputs": {"json": many}}
    if field == "arguments":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": many}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        fields = {"messages": [USER | {"content": "x"}, message]}
    with pytest.raises(InvalidRequest, match=rf"{field}: got '\[.*; give a JSON "):
        GenerationRequest.parse({"model": "demo", **fields})
