"""From records to rows: OpenAI Batch lines verbatim, templates, defaults, and every refusal."""

from __future__ import annotations

import datetime
import math
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx_producer import InvalidRequest, ModelInfo
from omlx_producer.bulk.records import Record
from omlx_producer.bulk.row import BadRow, Row, RowResult, write_line
from omlx_producer.bulk.shape import RowMaker, Shape, Template
from tests.helpers.bulk_runs import batch_line
from tests.helpers.image_parts import grey

MODELS = {"fake": ModelInfo(model="fake", context_length=1000, longest_token=1)}


def make(value: Any, kind: Any = "jsonl", line: int = 1, **shape: Any) -> Row | BadRow:
    return RowMaker(kind, Shape(**shape), MODELS).make(Record(line, value))


def row(value: Any, kind: Any = "jsonl", **shape: Any) -> Row:
    made = make(value, kind, **shape)
    assert isinstance(made, Row), made
    return made


def user_text(made: Row) -> str:
    """The text of the only message of a row."""
    (message,) = made.request.messages or ()
    assert message.role == "user"
    return message.text


def test_a_batch_line_is_taken_as_it_is() -> None:
    made = row(batch_line("a", "hello", temperature=0.5))
    assert (made.custom_id, made.line) == ("a", 1)
    assert made.request.to_wire() == {
        "model": "fake",
        "prompt": "hello",
        "max_completion_tokens": 5,
        "temperature": 0.5,
    }


def test_a_chat_line_keeps_its_messages() -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    messages = row(line).request.messages
    assert messages is not None
    assert messages[0].content == "hi"


def test_records_are_held_until_they_are_made() -> None:
    class Values(dict[str, Any]):
        """Can be watched."""

    kept = list[weakref.ref[Values]]()

    def records() -> Iterator[Record]:
        for line in range(3):
            values = Values(batch_line(str(line)))
            kept.append(weakref.ref(values))
            yield Record(line, values)

    checked = RowMaker("jsonl", Shape(), MODELS).checked(records())
    held = [[each() is not None for each in kept] for _ in checked]
    assert held[-1][:2] == [False, False]


def test_nobody_listens_to_tokens_so_none_are_streamed() -> None:
    assert row(batch_line("a", stream=True)).request.stream is None


DEEP = "invalid_request", "levels; give at most 100"


def nested(levels: int) -> Any:
    """Objects inside each other."""
    value: Any = "x"
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"custom_id": None}, "unparsable", "custom_id: got None"),
        ({"custom_id": 7}, "unparsable", "custom_id: got 7"),
        ({"custom_id": "x" * 600}, "unparsable", "1 to 512 characters"),
        ({"custom_id": "a\ud800"}, "unparsable", "custom_id: got 'a\\ud800'; give text without"),
        ({"method": "GET"}, "invalid_request", "method: got 'GET'; give 'POST'"),
        ({"url": "/v1/images"}, "invalid_request", "url: got '/v1/images'"),
        ({"url": "/v1/chat/completions"}, "invalid_request", "body.messages: missing"),
        ({"body": []}, "invalid_request", "body: got []"),
        ({"body": {"prompt": "x", "tempreature": 1}}, "invalid_request", "did you mean"),
        ({"body": {"prompt": "x", "model": "other"}}, "model_not_found", "no worker has announced"),
        ({"body": {"prompt": "x" * 1001}}, "invalid_request", "give at most the 1000 tokens"),
        ({"body": {"prompt": "\ud800"}}, "invalid_request", "prompt"),
        *(
            ({"body": {"prompt": "x", "chat_template_kwargs": nested(levels)}}, *DEEP)
            for levels in (101, 170, 240, 900)
        ),
    ],
)
def test_a_bad_line_has_a_code_and_a_sentence_with_its_line(
    change: dict[str, Any], code: str, reason: str
) -> None:
    bad = make({**batch_line("a"), **change}, line=12)
    assert isinstance(bad, BadRow)
    assert bad.code == code
    own = ", id 'a'" if bad.custom_id else ""
    assert bad.reason.startswith(f"line 12{own}: ")
    assert reason in bad.reason
    # A row has no options.
    assert "require_known_model" not in bad.reason


@pytest.mark.parametrize(
    ("value", "shape", "reason"),
    [
        ({"id": "a", "call": ""}, {"template": "{call}"}, "line 1, id 'a': call: empty; the"),
        ({"a": "", "b": ""}, {"template": "{a}{b}", "empty": "run"}, "line 1: a, b: empty; give"),
        ({"prompt": ""}, {}, "line 1: prompt: empty; the template needs it, so fill it in"),
        ({"a": "x" * 1001}, {"template": "{a}"}, "line 1: a: got 1001 characters, which are at"),
        ({"a": "\ud800"}, {"template": "{a}"}, "line 1: a: got '\\ud800'; give text without"),
        ("x" * 1001, {}, "line 1: prompt: got 1001 characters"),
        # Messages of its own are its field.
        ({"id": "a", "messages": []}, {}, "line 1, id 'a': messages: got []; give a list of"),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_an_error_of_a_row_names_its_id_and_its_columns(
    value: Any, shape: dict[str, Any], reason: str, raw: bool
) -> None:
    bad = make(value, raw=raw, **shape)
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith(reason)
    assert f": {bad.field}: " in bad.reason


@pytest.mark.parametrize(
    ("value", "field"), [({"text": "x", "id": "a"}, "text"), (batch_line("a"), "messages")]
)
def test_a_refusal_of_a_worker_names_the_columns_of_its_row(
    value: dict[str, Any], field: str
) -> None:
    row = make(value, template="{text}" if field == "text" else None)
    assert isinstance(row, Row)
    told = "messages: 9 tokens do not fit"
    refused = RowResult(row, "", code="invalid_request", reason=told, field="messages")
    read = RowResult.of_line(row, write_line(refused))
    assert read.reason == f"{field}: 9 tokens do not fit"


@pytest.mark.parametrize(
    ("template", "text"), [("Is it {colour}?", "colour"), ("What is it?", "messages[0].content")]
)
def test_a_refusal_of_a_picture_names_its_column_and_path(
    tmp_path: Path, template: str, text: str
) -> None:
    (tmp_path / "a.png").write_bytes(grey())
    shape = Shape(template=template, image="photo")
    models = {"fake": MODELS["fake"].model_copy(update={"picture_tokens": 64})}
    maker = RowMaker("csv", shape, models, folder=tmp_path)
    row = maker.make(Record(1, {"photo": "a.png", "colour": "grey"}))
    assert isinstance(row, Row), row
    fields = [*row.request.pictures, "messages[0].content"]
    told = [f"{field}: is cut off; send the whole file" for field in fields]
    refused = [
        RowResult(row, "", code="invalid_request", reason=reason, field=field)
        for field, reason in zip(fields, told, strict=True)
    ]
    assert [RowResult.of_line(row, write_line(each)).reason for each in refused] == [
        "photo: 'a.png': is cut off; send the whole file",
        f"{text}: is cut off; send the whole file",
    ]


@pytest.mark.parametrize("field", ["custom_id", "url", "body"])
def test_a_field_that_a_line_lacks_is_called_missing(field: str) -> None:
    bad = make({name: value for name, value in batch_line("a").items() if name != field})
    assert isinstance(bad, BadRow)
    assert f"{field}: missing; give " in bad.reason


def checked(*values: Any, kind: Any = "jsonl", **shape: Any) -> list[Record]:
    """The records that pass the look at the first ones."""
    records = [Record(line, value) for line, value in enumerate(values, 1)]
    return list(RowMaker(kind, Shape(**shape), MODELS).checked(records))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({}, "template: missing, but the input lacks the column prompt; it has a, b"),
        ({"template": "a"}, "template: got 'a', and all prompts would be alike; name a field"),
        ({"template": "{a} {c}"}, "got '{a} {c}', but the input lacks the column c; it has a, b"),
        (
            {"template": "{a}", "id_field": "k"},
            "id_field: got 'k', a column that the input lacks",
        ),
    ],
)
def test_a_column_that_the_input_lacks_is_told_before_anything_runs(
    shape: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked({"a": "1", "b": "2"}, kind="csv", **shape)
    assert reason in str(caught.value)


def test_objects_without_a_template_are_told_of_it_before_anything_runs() -> None:
    with pytest.raises(InvalidRequest, match="not body, messages or prompt; for objects of"):
        checked({"text": "hello"})


def test_a_column_that_some_of_the_first_rows_have_is_none_that_the_input_lacks() -> None:
    values = [None, {"b": 1}, {"a": 1}]
    shape: Any = {"template": "{a}", "empty": "fail"}
    assert [record.value for record in checked(*values, **shape)] == values
    assert checked(None, template="{a}")
    assert checked("hello", kind="text")


def test_looking_at_the_first_rows_passes_all_rows_on() -> None:
    values = [{"prompt": str(n)} for n in range(1000)]
    assert [record.value for record in checked(*values, kind="csv")] == values


@pytest.mark.parametrize("option", ["template", "id_field"])
def test_a_text_input_has_no_columns(option: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{option}: a text input has no"):
        RowMaker("text", Shape(**{option: "{text}"}), MODELS)


@pytest.mark.parametrize(("option", "value"), [("raw", True), ("system", "be brief")])
def test_batch_lines_have_their_own_messages(option: str, value: Any) -> None:
    reason = f"{option}: OpenAI Batch lines have their own"
    with pytest.raises(InvalidRequest, match=reason):
        checked(batch_line("a"), **{option: value})
    later = make(batch_line("a"), **{option: value})
    assert isinstance(later, BadRow)
    assert reason in later.reason
    row({"text": "hello"}, template="{text}", **{option: value})


def test_an_object_with_a_prompt_is_a_text_with_fields_of_its_own() -> None:
    made = row({"id": 7, "prompt": "hello", "max_tokens": 3, "label": "x"}, system="be brief")
    assert made.custom_id == "7"
    assert [message.text for message in made.request.messages or ()] == ["be brief", "hello"]
    assert made.request.max_completion_tokens == 3
    assert row({"prompt": "hello"}, raw=True).request.prompt == "hello"
    assert row({"prompt": [1, 2]}).request.prompt == [1, 2]


def test_a_row_nested_too_deeply_is_a_bad_row() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for change in ({"method": deep}, {"custom_id": None, "x": deep}):
        bad = make(batch_line("a") | change)
        assert isinstance(bad, BadRow)
        assert bad.reason == "line 1: nested too deeply"


def test_a_template_makes_prompts_of_objects() -> None:
    made = row({"text": "long", "n": 3}, template="Summarise: {text} {n} {{x}}")
    assert user_text(made) == "Summarise: long 3 {x}"
    assert made.custom_id == "row-1"


def test_columns_make_prompts_by_default_from_prompt() -> None:
    assert user_text(row({"prompt": "p", "other": "o"}, "csv")) == "p"


def test_the_id_may_be_a_column_and_must_then_be_there() -> None:
    assert row({"prompt": "p", "key": 12}, "csv", id_field="key").custom_id == "12"
    assert isinstance(make({"prompt": "p"}, "csv", id_field="key"), BadRow)


def test_the_id_is_looked_for_in_custom_id_and_then_in_id() -> None:
    assert row({"prompt": "p", "id": 7, "custom_id": "a"}, "csv").custom_id == "a"
    assert row({"prompt": "p", "id": 7}, "csv").custom_id == "7"
    assert row({"prompt": "p", "id": 7, "custom_id": None}, "csv").custom_id == "7"
    assert row({"prompt": "p", "id": 7}, template="{prompt}").custom_id == "7"
    assert row({"prompt": "p", "id": 7, "key": "k"}, "csv", id_field="key").custom_id == "k"
    assert row({"prompt": "p", "id": None}, "csv").custom_id == "row-1"


def test_the_id_of_a_batch_line_is_its_custom_id_alone() -> None:
    assert isinstance(make(batch_line("a") | {"custom_id": None, "id": "b"}), BadRow)


def test_a_missing_column_is_a_bad_row_that_says_which_there_are() -> None:
    bad = make({"a": "1", "b": "2"}, "csv", template="{text}")
    assert isinstance(bad, BadRow)
    assert "text: the template needs it and the row has none; the row has a, b" in bad.reason


CALLS = [{"id": 1, "call": "a"}, {"id": 2, "call": " "}, {"id": 3, "call": None, "by": math.nan}]


@pytest.mark.parametrize(
    ("values", "template", "said"),
    [
        (CALLS, "{id}: {call}", "2 rows have an empty {call}, first in line 2"),
        (CALLS[:2], "{call}{call}", "1 row has an empty {call}, first in line 2"),
        (
            CALLS,
            "{call}{by}",
            "3 rows have an empty {by} and 2 rows have an empty {call}, first in",
        ),
        ([{"prompt": ""}], None, "1 row has an empty {prompt}, first in line 1"),
    ],
)
def test_rows_with_empty_fields_are_counted_before_anything_runs(
    values: list[Any], template: str | None, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^empty: missing, and {re.escape(said)}") as caught:
        checked(*values, template=template)
    assert str(caught.value).endswith("; give skip, fail or run")


def test_all_rows_are_counted_if_they_can_be_read_twice() -> None:
    records = [Record(line, {"a": "" if line > 200 else "x"}) for line in range(1, 301)]
    maker = RowMaker("csv", Shape(template="{a}"), MODELS)
    assert len(list(maker.checked(records))) == 300
    with pytest.raises(InvalidRequest, match=r"100 rows have an empty \{a\}, first in line 201"):
        maker.checked(records, records)


def test_rows_with_empty_fields_are_left_out_or_fail_or_run_as_asked() -> None:
    def made(empty: Any) -> list[Row | BadRow]:
        records = [Record(line, value) for line, value in enumerate(CALLS, 1)]
        maker = RowMaker("csv", Shape(template="Call: {call}", empty=empty), MODELS)
        found = [maker.make(record) for record in maker.checked(records)]
        assert maker.skipped == len(CALLS) - len(found)
        return found

    assert [each.custom_id for each in made("skip")] == ["1"]
    good, *bad = made("fail")
    assert isinstance(good, Row)
    for each, reason in zip(bad, ("call: empty; ", "call: the template needs it"), strict=True):
        assert isinstance(each, BadRow)
        assert (each.code, each.own_id) == ("invalid_request", True)
        assert reason in each.reason
    texts = [user_text(each) for each in made("run") if isinstance(each, Row)]
    assert texts == ["Call: a", "Call:  ", "Call: "]


def test_rows_that_do_not_go_by_the_template_have_no_empty_fields() -> None:
    values = [batch_line("a"), {"id": "b", "messages": MESSAGES}, {"id": "c", "prompt": [1]}]
    assert len(checked(*values)) == 3
    assert len(checked("", "x")) == 2


def test_a_row_of_which_only_a_part_could_be_read_keeps_its_id() -> None:
    maker = RowMaker("csv", Shape(template="{a}"), MODELS)
    bad = maker.make(Record(3, {"id": 7, "a": "caf\udce9"}, "not UTF-8"))
    assert isinstance(bad, BadRow)
    assert (bad.custom_id, bad.own_id, bad.code) == ("7", True, "unparsable")
    assert bad.reason == "line 3, id '7': not UTF-8"
    nameless = maker.make(Record(3, {"id": "\udce9", "a": "x"}, "not UTF-8"))
    assert isinstance(nameless, BadRow)
    assert (nameless.custom_id, nameless.reason) == (None, "line 3: not UTF-8")


def test_an_input_of_which_nothing_can_be_read_is_refused_once() -> None:
    bad = [Record(line, None, "not JSON") for line in (2, 3)]
    maker = RowMaker("jsonl", Shape(), MODELS)
    with pytest.raises(InvalidRequest, match=r"^line 2: not JSON$"):
        maker.checked(bad)
    assert len(list(maker.checked([*bad, Record(4, batch_line("a"))]))) == 3


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        ("text", "hello", False),
        ("csv", {"prompt": "x", "model": "fake"}, False),
        ("jsonl", {"prompt": "x"}, False),
        ("jsonl", {"prompt": "x", "model": "fake"}, True),
        ("jsonl", {**batch_line("a"), "body": {"prompt": "x"}}, False),
        ("jsonl", batch_line("a"), True),
    ],
)
def test_rows_that_name_none_of_several_models_are_refused_before_anything_runs(
    kind: Any, value: Any, named: bool
) -> None:
    models, records = {**MODELS, "other": MODELS["fake"]}, [Record(1, value)]
    for maker in (
        RowMaker(kind, Shape(model="other"), models),
        RowMaker(kind, Shape(), models, default_model="other"),
        *([RowMaker(kind, Shape(), models)] if named else []),
    ):
        assert len(list(maker.checked(records))) == 1
    if not named:
        with pytest.raises(InvalidRequest, match=r"model: missing, .* give one of fake, other$"):
            RowMaker(kind, Shape(), models).checked(records)


@pytest.mark.parametrize(("row", "has"), [({"a": 1, "b": None}, "a"), ({"b": None}, "nothing")])
def test_a_column_without_a_value_is_not_among_those_that_a_row_has(
    row: dict[str, Any], has: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"b: .*; the row has {has}$"):
        Template("{b}").render(row)


@pytest.mark.parametrize("text", ["{", "{a!r}", "{a:>3}", "{}", '{"json": 1}'])
def test_a_template_that_is_none_is_refused_at_once(text: str) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        Template(text)


def test_a_template_looks_nothing_up_inside_of_values() -> None:
    with pytest.raises(InvalidRequest, match="the row has none"):
        Template("{a.__class__}").render({"a": "x"})


def test_text_is_a_chat_unless_the_checkpoint_has_no_template() -> None:
    assert user_text(row("hello", "text")) == "hello"
    assert row("hello", "text", raw=True).request.prompt == "hello"
    bare = {"fake": MODELS["fake"].model_copy(update={"chat_template": False})}
    made = RowMaker("text", Shape(), bare).make(Record(1, "hello"))
    assert isinstance(made, Row)
    assert made.request.prompt == "hello"
    refused = RowMaker("text", Shape(system="be brief"), bare).make(Record(1, "hello"))
    assert isinstance(refused, BadRow)
    assert "fake has no chat template; give a prompt instead" in refused.reason


def test_a_text_for_a_model_that_nobody_announced_is_a_chat() -> None:
    maker = RowMaker("text", Shape(model="asleep"), {}, require_known_model=False)
    made = maker.make(Record(1, "hello"))
    assert isinstance(made, Row)
    assert user_text(made) == "hello"


def test_a_system_message_goes_before_each_text() -> None:
    messages = row("hello", "text", system="be brief").request.messages
    assert messages is not None
    assert [(message.role, message.text) for message in messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]


def test_options_are_for_rows_that_do_not_say() -> None:
    sampling = {"max_completion_tokens": 9, "temperature": 0.1}
    made = row(batch_line("a", temperature=1.5), sampling=sampling)
    assert made.request.max_completion_tokens == 5
    assert made.request.temperature == 1.5
    assert row("hello", "text", sampling=sampling).request.max_completion_tokens == 9


def test_a_field_that_is_null_takes_the_option() -> None:
    sampling = {"max_completion_tokens": 9, "temperature": 0.1}
    made = row(batch_line("a", temperature=None, max_tokens=None), sampling=sampling)
    assert (made.request.temperature, made.request.max_completion_tokens) == (0.1, 9)


def test_fields_without_effect_are_counted_and_change_nothing() -> None:
    maker = RowMaker("jsonl", Shape(), MODELS)
    plain = maker.make(Record(1, batch_line("a")))
    given = maker.make(Record(1, batch_line("a", user="me", metadata={"a": "b"}, store=None)))
    maker.make(Record(2, batch_line("b", user="me")))
    assert plain == given
    assert maker.ignored == {"user": 2, "metadata": 1}


def test_the_models_of_the_rows_are_known() -> None:
    maker = RowMaker("jsonl", Shape(), MODELS)
    maker.make(Record(1, batch_line("a")))
    maker.make(Record(2, batch_line("b", model="other")))
    assert maker.used == {"fake"}


def test_values_that_are_no_text_are_written_as_json_without_escapes() -> None:
    assert user_text(row({"tags": ["é"]}, template="{tags}")) == '["é"]'


def test_the_model_given_is_for_all_rows() -> None:
    assert row(batch_line("a", model="gpt-4o-mini"), model="fake").request.model == "fake"


def test_a_run_that_no_worker_could_serve_is_refused_as_a_whole() -> None:
    with pytest.raises(InvalidRequest, match="no worker has announced a model yet"):
        RowMaker("text", Shape(), {})
    with pytest.raises(InvalidRequest, match="no worker has announced"):
        RowMaker("text", Shape(model="other"), MODELS)
    RowMaker("text", Shape(model="other"), {}, require_known_model=False)


def test_an_option_may_go_with_what_the_lines_ask_for_themselves() -> None:
    asking = row(batch_line("a", logprobs=True), sampling={"top_logprobs": 3})
    assert (asking.request.logprobs, asking.request.top_logprobs) == (True, 3)
    with pytest.raises(InvalidRequest, match="top_logprobs: got 3 without logprobs"):
        row("a", "text", sampling={"top_logprobs": 3})


def test_values_that_json_does_not_know_are_written_as_text() -> None:
    day = datetime.date(2024, 2, 29)
    assert user_text(row({"day": day}, "parquet", template="On {day}")) == "On 2024-02-29"
    assert isinstance(make({"day": day}, "parquet", template="{text}"), BadRow)


def test_the_digest_follows_from_id_and_request_and_nothing_else() -> None:
    one = row(batch_line("a"))
    moved = make(batch_line("a"), line=99)
    respelt = row({**batch_line("a"), "body": {"max_completion_tokens": 5, "prompt": "hello"}})
    assert one.digest == moved.digest == respelt.digest
    others = [batch_line("b"), batch_line("a", "other"), batch_line("a", seed=1)]
    assert len({one.digest, *(row(other).digest for other in others)}) == 4


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "messages"),
    [("jsonl", MESSAGES), ("parquet", MESSAGES), ("csv", '[{"role": "user", "content": "hi"}]')],
)
def test_a_row_with_messages_of_its_own_is_a_chat(kind: Any, messages: Any) -> None:
    value = {"id": 7, "label": "x", "messages": messages}
    (record,) = checked(value, kind=kind)
    made = make(record.value, kind)
    assert isinstance(made, Row), made
    assert made.custom_id == "7"
    assert made.request.to_wire() == {"model": "fake", "messages": MESSAGES}


def test_in_jsonl_the_fields_of_a_request_count_beside_messages() -> None:
    value = {"messages": MESSAGES, "max_tokens": 5, "seed": 3, "top_k": None, "label": "x"}
    made = row(value, sampling={"seed": 4, "top_k": 2})
    wire = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 5}
    assert made.request.to_wire() == wire | {"seed": 3, "top_k": 2}
    refused = make(value | {"functions": [{}]})
    assert isinstance(refused, BadRow)
    assert refused.reason.startswith("line 1: functions: ")


def test_elsewhere_columns_beside_messages_are_data() -> None:
    made = row({"messages": MESSAGES, "seed": 3, "audio": "a.wav"}, "parquet")
    assert made.request.to_wire() == {"model": "fake", "messages": MESSAGES}


def test_a_system_message_goes_before_messages_that_have_none() -> None:
    system = {"role": "system", "content": "be brief"}
    for given in (MESSAGES, [system, *MESSAGES]):
        made = row({"messages": given}, "parquet", system="be brief")
        assert made.request.to_wire()["messages"] == [system, *MESSAGES]


@pytest.mark.parametrize("messages", ["hello", "[" * 100_000, "5", "[]", [5], 5])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_messages_that_are_none_are_told(messages: Any, system: str | None) -> None:
    bad = make({"messages": messages}, "csv", system=system)
    assert isinstance(bad, BadRow)
    assert bad.code == "invalid_request"
    assert "messages" in bad.reason


def test_a_template_is_used_although_there_are_messages() -> None:
    made = row({"messages": MESSAGES, "text": "x"}, template="{text}")
    assert "hi" not in str(made.request.to_wire())
    line = batch_line("a") | {"messages": MESSAGES}
    assert row(line).request.prompt == "hello"
