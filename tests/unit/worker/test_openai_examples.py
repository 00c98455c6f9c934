"""Requests in the style of OpenAI's examples run as they are, and its types read the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from omlx_producer import ChatChunks
from omlx_producer.bulk.records import read_records
from omlx_producer.bulk.row import Row as BulkRow
from omlx_producer.bulk.shape import RowMaker, Shape
from omlx_producer.wire import Constraint, GenerationRequest, ModelInfo
from omlx_worker.delivery.response import finished
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.text import RowText
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from tests.helpers.chats import tokenizer_of, vocabulary

FILE = Path(__file__).parents[2] / "helpers" / "openai_examples.jsonl"
INFO = ModelInfo(model="m", context_length=8192, longest_token=1)
PARIS = {"location": "Paris, France", "units": None}
STEP = {"explanation": "Take 7 from both sides.", "output": "8x = -30"}
BUTTON = {"type": "button", "label": "Save", "children": [], "attributes": []}


def call_in_json(arguments: dict[str, Any]) -> str:
    text = json.dumps({"name": "get_weather", "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def call_in_pairs(arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<parameter={key}>\n{'null' if value is None else value}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function=get_weather>\n{pairs}</function>\n</tool_call>"


CALLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "json_tools": call_in_json,
    "qwen3_coder": call_in_pairs,
}
ANSWERS: dict[str, Any] = {
    "entities": {"attributes": ["quick"], "colors": ["red"], "animals": ["fox"]},
    "steps": {"steps": [STEP, STEP], "final_answer": "x = -3.75"},
    "tree": {
        **BUTTON,
        "type": "form",
        "children": [{**BUTTON, "children": [BUTTON]}],
        "attributes": [{"name": "id", "value": "f"}],
    },
    "list": {"linked_list": {"value": 1, "next": {"value": 2.5, "next": None}}},
    "json-mode": {"winner": "nobody"},
}
CALLING = ("weather", "weather-required", "weather-named")


def requests() -> dict[str, GenerationRequest]:
    """The requests of the file, as a bulk run makes them."""
    maker = RowMaker("jsonl", Shape(model="m"), {"m": INFO})
    with FILE.open("rb") as stream:
        rows = [maker.make(record) for record in read_records(stream, "jsonl")]
    made = {row.custom_id: row.request for row in rows if isinstance(row, BulkRow)}
    assert len(made) == len(rows), [row for row in rows if not isinstance(row, BulkRow)]
    return made


def prepared(family: str, request: GenerationRequest) -> tuple[ActiveJob, Constraint | None]:
    """The job of a request, and what its only answer must match."""
    chat = Chat(tokenizer_of(family), "m")
    text = chat.text(request)
    row = RowRequest("j:0", chat.encode(text), 1000, Sampling(), reply=chat.reply(request, text))
    claim = Claim("j", "omlx-1", "omlx:m:default", 0.0, 0, b"", None, False)
    return ActiveJob(claim, request, [row], streams=True), chat.constraint(request, row.reply)


def grammar_of(constraint: Constraint) -> str:
    if constraint.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(constraint.value))
    return str(LLMatcher.grammar_from_json_schema(constraint.value or '{"type": "object"}'))


def answered(family: str, request: GenerationRequest, text: str) -> tuple[Any, Any]:
    """What OpenAI's types read when the model generates this text: the answer and the stream."""
    tokenizer = tokenizer_of(family)
    job, constraint = prepared(family, request)
    [row] = job.rows
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if constraint is not None:
        matcher = LLMatcher(vocabulary(tokenizer), grammar_of(constraint))
        assert matcher.try_consume_tokens(tokens) == len(tokens), matcher.get_error()
        assert matcher.is_accepting()
    chunks, state = ChatChunks("j", "m"), ChatCompletionStreamState()
    written = RowText(row.request, tokenizer)
    for token in tokens:
        row.tokens.append(token)
        marked = len(written.marks)
        said = written.feed(token).text
        job.feed(Emission(row.row_id, [token], said, marks=written.marks[marked:]))
        event = job.take_event()
        assert event is not None
        for chunk in chunks.take(event):
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    job.feed(Emission(row.row_id, [], "", finish_reason="stop"))
    ending = finished(job)
    for chunk in chunks.take(ending.event):  # type: ignore[arg-type]
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    whole = ChatCompletion.model_validate(ending.result)
    return whole.choices[0], state.get_final_completion().choices[0]


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("name", CALLING)
def test_a_function_is_called(family: str, name: str) -> None:
    text = CALLS[family](PARIS)
    whole, streamed = answered(family, requests()[name], text)
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    [call], [again] = whole.message.tool_calls, streamed.message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(again.function.arguments) == PARIS
    assert (call.id, call.function.name) == (again.id, "get_weather")
    assert whole.message.content is None


@pytest.mark.parametrize("family", CALLS)
def test_what_a_function_returned_is_answered_in_words(family: str) -> None:
    whole, streamed = answered(family, requests()["weather-answered"], "It has 14 degrees.\n")
    assert whole.message.content == streamed.message.content == "It has 14 degrees.\n"
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_matches_its_schema(name: str) -> None:
    request = requests()[name]
    text = json.dumps(ANSWERS[name])
    whole, streamed = answered("json_tools", request, text)
    assert whole.message.content == streamed.message.content == text
    assert request.response_format is not None
    if (named := request.response_format.json_schema) is not None:
        jsonschema.validate(json.loads(whole.message.content), named.schema_)


def test_every_example_is_answered_by_a_test() -> None:
    assert {*requests()} == {*CALLING, *ANSWERS, "weather-answered"}
