"""From records to rows: OpenAI Batch lines verbatim, templates, defaults, and every refusal."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from omlx_producer import InvalidRequest, ModelInfo
from omlx_producer.bulk.records import Record
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.bulk.shape import RowMaker, Shape, Template
from tests.helpers.bulk_runs import batch_line

MODELS = {"fake": ModelInfo(model="fake", context_length=1000, longest_token=1)}


def make(value: Any, kind: Any = "jsonl", line: int = 1, **shape: Any) -> Row | BadRow:
    return RowMaker(kind, Shape(**shape), MODELS).make(Record(line, value))


def row(value: Any, kind: Any = "jsonl", **shape: Any) -> Row:
    made = make(value, kind, **shape)
    assert isinstance(made, Row), made
    return made


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


def test_nobody_listens_to_tokens_so_none_are_streamed() -> None:
    assert row(batch_line("a", stream=True)).request.stream is None


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"custom_id": None}, "unparsable", "custom_id: got None"),
        ({"custom_id": 7}, "unparsable", "custom_id: got 7"),
        ({"custom_id": "x" * 600}, "unparsable", "1 to 512 characters"),
        ({"method": "GET"}, "invalid_request", "method: got 'GET'; give 'POST'"),
        ({"url": "/v1/embeddings"}, "invalid_request", "url: got '/v1/embeddings'"),
        ({"url": "/v1/chat/completions"}, "invalid_request", "body.messages: missing"),
        ({"body": []}, "invalid_request", "body: got []"),
        ({"body": {"prompt": "x", "tempreature": 1}}, "invalid_request", "did you mean"),
        ({"body": {"prompt": "x", "model": "other"}}, "invalid_request", "no worker has announced"),
        ({"body": {"prompt": "x" * 1001}}, "invalid_request", "give at most the 1000 tokens"),
        ({"body": {"prompt": "\ud800"}}, "invalid_request", "prompt"),
    ],
)
def test_a_bad_line_has_a_code_and_a_sentence_with_its_line(
    change: dict[str, Any], code: str, reason: str
) -> None:
    bad = make({**batch_line("a"), **change}, line=12)
    assert isinstance(bad, BadRow)
    assert bad.code == code
    assert bad.reason.startswith("line 12: ")
    assert reason in bad.reason


def test_an_object_without_a_template_is_told_of_it() -> None:
    bad = make({"text": "hello"})
    assert isinstance(bad, BadRow)
    assert "give --template" in bad.reason


def test_a_template_makes_prompts_of_objects() -> None:
    made = row({"text": "long", "n": 3}, template="Summarise: {text} {n} {{x}}")
    assert made.request.prompt == "Summarise: long 3 {x}"
    assert made.custom_id == "row-1"


def test_columns_make_prompts_by_default_from_prompt() -> None:
    assert row({"prompt": "p", "other": "o"}, "csv").request.prompt == "p"


def test_the_id_may_be_a_column_and_must_then_be_there() -> None:
    assert row({"prompt": "p", "key": 12}, "csv", id_field="key").custom_id == "12"
    assert isinstance(make({"prompt": "p"}, "csv", id_field="key"), BadRow)


def test_a_missing_column_is_a_bad_row_that_says_which_there_are() -> None:
    bad = make({"a": "1", "b": "2"}, "csv", template="{text}")
    assert isinstance(bad, BadRow)
    assert "text: the template needs it and the row has none; the row has a, b" in bad.reason


@pytest.mark.parametrize("text", ["{", "{a!r}", "{a:>3}", "{}", '{"json": 1}'])
def test_a_template_that_is_none_is_refused_at_once(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--template"):
        Template(text)


def test_a_template_looks_nothing_up_inside_of_values() -> None:
    with pytest.raises(InvalidRequest, match="the row has none"):
        Template("{a.__class__}").render({"a": "x"})


def test_text_becomes_prompts_or_user_messages() -> None:
    assert row("hello", "text").request.prompt == "hello"
    messages = row("hello", "text", chat=True, system="be brief").request.messages
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


def test_the_model_given_is_for_all_rows() -> None:
    assert row(batch_line("a", model="gpt-4o-mini"), model="fake").request.model == "fake"


def test_a_run_that_no_worker_could_serve_is_refused_as_a_whole() -> None:
    with pytest.raises(InvalidRequest, match="no worker has announced one yet"):
        RowMaker("text", Shape(), {})
    with pytest.raises(InvalidRequest, match="no worker has announced"):
        RowMaker("text", Shape(model="other"), MODELS)
    RowMaker("text", Shape(model="other"), {}, require_known_model=False)


def test_values_that_json_does_not_know_are_written_as_text() -> None:
    day = datetime.date(2024, 2, 29)
    assert row({"day": day}, "parquet", template="On {day}").request.prompt == "On 2024-02-29"
    assert isinstance(make({"day": day}, "parquet", template="{text}"), BadRow)


def test_the_digest_follows_from_id_and_request_and_nothing_else() -> None:
    one = row(batch_line("a"))
    moved = make(batch_line("a"), line=99)
    respelt = row({**batch_line("a"), "body": {"max_completion_tokens": 5, "prompt": "hello"}})
    assert one.digest == moved.digest == respelt.digest
    others = [batch_line("b"), batch_line("a", "other"), batch_line("a", seed=1)]
    assert len({one.digest, *(row(other).digest for other in others)}) == 4
