"""OpenAI's Responses over HTTP and as rows of files: every field, every item, nothing lost."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from openai import OpenAI
from openai.types.responses import Response, response_create_params
from redis import Redis

from omlx_producer import Completion, GenerationRequest, InvalidRequest, Producer, read_results
from omlx_producer.cli.main import cli
from omlx_producer.wire import events_key
from omlx_producer.wire.answer import as_completion, response_of
from omlx_producer.wire.responses import chat_fields
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.image_parts import grey, image, part_of, url_of
from tests.helpers.waiting import fetch
from tests.helpers.workers import ALIAS, wait_for

URL: Any = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
# Every parameter with a value that is not its default, and what becomes of it: the field of the
# chat with its value there, or "refused", or "ignored".
FIELDS: dict[str, tuple[str, Any, Any]] = {
    "access_programs": ("refused", {"a": True}, None),
    "background": ("refused", True, None),
    "background_options": ("refused", {}, None),
    "context_management": ("refused", [], None),
    "conversation": ("refused", "conv_1", None),
    "image": ("refused", {}, None),
    "include": ("refused", ["reasoning.encrypted_content"], None),
    "input": ("messages", "other", [{"role": "user", "content": "other"}]),
    "instructions": (
        "messages",
        "Be brief.",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
    ),
    "max_output_tokens": ("max_completion_tokens", 5, 5),
    "max_tool_calls": ("ignored", 3, None),
    "metadata": ("responses", {"a": "b"}, {"metadata": {"a": "b"}}),
    "model": ("model", ALIAS, ALIAS),
    "moderation": ("refused", {"model": "m"}, None),
    "parallel_tool_calls": ("parallel_tool_calls", False, False),
    "previous_response_id": ("refused", "resp_1", None),
    "prompt": ("refused", {"id": "p"}, None),
    "prompt_cache_key": ("ignored", "k", None),
    "prompt_cache_options": ("ignored", {"mode": "explicit"}, None),
    "prompt_cache_retention": ("ignored", "24h", None),
    "reasoning": ("reasoning_effort", {"effort": "low", "summary": "auto"}, "low"),
    "safety_identifier": ("ignored", "x", None),
    "service_tier": ("ignored", "flex", None),
    "store": ("ignored", True, None),
    "stream": ("stream", True, True),
    "stream_options": ("ignored", {"include_obfuscation": True}, None),
    "temperature": ("temperature", 0.5, 0.5),
    "text": ("response_format", {"format": {"type": "json_object"}}, {"type": "json_object"}),
    "tool_choice": ("tool_choice", "required", "required"),
    "tools": (
        "tools",
        [TOOL],
        [{"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}],
    ),
    "top_logprobs": ("refused", 2, None),
    "top_p": ("top_p", 0.5, 0.5),
    "truncation": ("refused", "auto", None),
    "user": ("ignored", "x", None),
}
BESIDE: dict[str, dict[str, Any]] = {
    "parallel_tool_calls": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL]},
}
PLAIN = {"model": ALIAS, "input": "a"}
PICTURE = {"type": "input_image", "image_url": url_of(grey())}
# In the engine of the tests, prompt and seed say whether a text ends before its limit.
CUT = {"max_output_tokens": 4, "seed": 1}


def require_whole(body: dict[str, Any]) -> Response:
    """Fail if OpenAI's type refuses a body or loses a part of it."""
    parsed = Response.model_validate(body)
    assert parsed.model_dump(mode="json", exclude_unset=True, by_alias=True) == body
    return parsed


def wire(**fields: Any) -> dict[str, Any]:
    """What workers get of a request."""
    return GenerationRequest.parse(chat_fields({**PLAIN, **fields})).to_wire()


def test_the_walk_knows_every_parameter_of_a_response() -> None:
    params = response_create_params
    both = params.ResponseCreateParamsStreaming, params.ResponseCreateParamsNonStreaming
    assert set(FIELDS) == {name for kind in both for name in typing.get_type_hints(kind)}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_of_a_response_reaches_the_chat_changes_nothing_or_is_refused_by_name(
    field: str,
) -> None:
    fate, given, chat = FIELDS[field]
    beside = BESIDE.get(field, {})
    if fate == "refused":
        with pytest.raises(InvalidRequest, match=f"^{field}: (?!unknown)"):
            wire(**{field: given})
    elif fate == "ignored":
        assert wire(**{field: given}) == wire()
    else:
        found = wire(**beside, **{field: given})
        assert found[fate] == chat
        assert field == "model" or found != wire(**beside)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": None}, "input: missing; give text or a list"),
        ({"input": ""}, "input: none has any text"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role: got 'king'; give one of"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]: got "),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content: got 5; give parts"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": 5}]},
            "input[0].content: got 5; give text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]: got {'type': 'input_file'}; give ",
        ),
        (
            {"input": [{"role": "user", "content": [{**PICTURE, "image_url": "http://a"}]}]},
            "input[0].content[0].image_url: got 'http://a', and workers fetch nothing; give",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id: no files are read; give image_url",
        ),
        (
            {"input": [{"role": "assistant", "content": [PICTURE]}]},
            "input[0].content[0].image_url: given in a message of the assistant; give",
        ),
        ({"input": [{"role": "user", "content": "a", "tool": 1}]}, "input[0].tool: unknown field"),
        ({"instructions": 5}, "instructions: got 5; give text"),
        ({"max_output_tokens": 0}, "max_output_tokens: got 0 without prompt_logprobs; give"),
        ({"metadata": {"a": 5}}, "metadata.a: got 5; give up to 16 texts"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort: got 'huge'; give one of"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode: not supported; remove it"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: got 'xml'; give"),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "text.format.name: missing; give",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: got 'web_search'; give"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: got 'a b'; give"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name: "),
        ({"messages": []}, "messages: unknown here; give input"),
        ({"responses": {}}, "responses: unknown field; remove it"),
    ],
)
def test_a_mistake_is_named_as_the_request_names_it(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire(**fields)
    assert str(caught.value).startswith(sentence)


def test_a_picture_of_a_response_is_one_of_its_chat() -> None:
    text = {"type": "input_text", "text": "a"}
    asked = wire(input=[{"role": "user", "content": [text, PICTURE | {"detail": "high"}]}])
    assert asked["messages"][0]["content"] == [part_of("a"), image()]


def test_the_output_of_a_response_goes_on_as_input_with_the_outputs_of_its_calls() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {
        "role": "assistant",
        "content": "Wait.",
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    completion: dict[str, Any] = {
        "id": "chatcmpl-j",
        "created": 1,
        "model": ALIAS,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 1},
            "speculation": {},
        },
    }
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    asked = chat_fields(
        {
            **PLAIN,
            "instructions": "i",
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "max_tokens": 9},
            "text": {"format": schema},
            "tools": [TOOL],
        }
    )
    body = response_of(GenerationRequest.parse(asked), Completion(completion))
    response = require_whole(body)
    back, given = Completion(dict(as_completion(body))), Completion(completion)
    assert (back.choices, back.usage) == (given.choices, given.usage)
    assert asked["thinking_token_budget"] == 9
    assert response.usage
    assert response.usage.output_tokens_details.reasoning_tokens == 1
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.instructions, response.metadata) == ("i", {"a": "b"})
    assert body["text"] == {"format": schema}
    assert {name: body["tools"][0][name] for name in TOOL} == TOOL
    answer = {"type": "function_call_output", "call_id": "call_1", "output": "5"}
    first = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    assert wire(input=[first, *body["output"], answer])["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            **message,
            "content": [{"type": "text", "text": "Wait."}],
            "tool_calls": [{"id": "call_1", "function": call["function"]}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]


@pytest.mark.usefixtures("worker")
def test_a_response_comes_over_http(client: OpenAI, gateway: str, connection: Redis) -> None:
    asked = {**PLAIN, "instructions": "Be brief.", "metadata": {"a": "b"}, **CUT, "seed": 0}
    answer = httpx2.post(f"{gateway}{URL}", json=asked)
    response = require_whole(answer.json())
    assert (response.status, response.metadata) == ("incomplete", {"a": "b"})
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage
    assert response.usage.output_tokens == 4
    request = fetch(connection, answer.headers["x-omlx-job"]).kwargs["request"]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert client.responses.create(model=ALIAS, input="a", max_output_tokens=4).output_text


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"prompt": {"id": "p"}}])
def test_a_field_that_is_not_served_is_refused_by_name_over_http(
    gateway: str, fields: dict[str, Any]
) -> None:
    answer = httpx2.post(f"{gateway}{URL}", json={**PLAIN, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("seed", "status"), [(1, "incomplete"), (0, "completed")])
def test_a_response_streams_to_what_it_is_whole(client: OpenAI, seed: int, status: str) -> None:
    asked: dict[str, Any] = {"model": ALIAS, "input": "a", "metadata": {"a": "b"}}
    asked |= {"max_output_tokens": 4 if seed else 210, "extra_body": {"seed": seed}}
    whole = client.responses.create(**asked)
    *events, last = client.responses.create(**asked, stream=True)
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text
    assert last.type == f"response.{status}"
    told, same = last.response.to_dict(), whole.to_dict()
    for response in (told, same):
        for each in (response, *response["output"]):
            del each["id"]
        del response["created_at"]
    assert told == same


@pytest.mark.usefixtures("worker")
def test_a_stream_of_a_response_calls_functions(client: OpenAI) -> None:
    tool: Any = TOOL
    with client.responses.stream(
        model=ALIAS, input="a", tools=[tool], max_output_tokens=210, extra_body={"seed": 0}
    ) as stream:
        deltas = [
            each.delta for each in stream if each.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    calls: list[Any] = [item for item in final.output if item.type == "function_call"]
    assert {call.name for call in calls} == {"f"}
    assert [call.arguments for call in calls] == deltas
    assert final.output[0].type == "reasoning"


@pytest.mark.usefixtures("worker")
def test_a_stream_of_a_response_goes_on_after_the_last_event_that_came(gateway: str) -> None:
    body = {**PLAIN, "stream": True, "max_output_tokens": 40, "seed": 4}

    def read(headers: dict[str, str]) -> tuple[list[str], list[int]]:
        ids, numbers = list[str](), list[int]()
        with httpx2.stream("POST", f"{gateway}{URL}", json=body, headers=headers) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    ids.append(line[4:])
                if line.startswith("data: "):
                    numbers.append(json.loads(line[6:])["sequence_number"])
                    if ids[5:] and not headers.get("Last-Event-ID"):
                        break
        return ids, numbers

    ids, begun = read({"X-Omlx-Detach": "true"})
    _, rest = read({"Last-Event-ID": ids[-1]})
    assert begun + rest == list(range(len(begun + rest)))


@pytest.mark.parametrize(
    ("parts", "told"), [(["a", "b", " c"], "c"), (["ab", " c"], "c"), (["ab c"], None)]
)
def test_a_response_goes_on_though_its_tokens_were_written_again_in_other_parts(
    gateway: str, redis_url: str, connection: Redis, parts: list[str], told: str | None
) -> None:
    body = {**PLAIN, "stream": True}
    with Producer(redis_url) as producer:
        job = producer.submit(chat_fields(body), require_known_model=False)

    def write(texts: list[str]) -> None:
        worker = FakeWorker(connection, job.id)
        worker.start()
        for text in texts:
            worker.step(text, tokens=len(text))

    def read(last: str, until: str) -> tuple[str, list[int], str]:
        got, numbers, text = "", list[int](), ""
        with httpx2.stream(
            "POST", f"{gateway}{URL}", json=body, headers={"Last-Event-ID": last}
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    got = line[4:]
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    numbers.append(event["sequence_number"])
                    text += event["delta"] if event["type"].endswith("text.delta") else ""
                    if text == until:
                        break
            else:
                assert answer.status_code == 500
        return got, numbers, text

    write(["a", "b"])
    last, begun, _ = read(f"{job.id}:0", "ab")
    connection.delete(events_key(job.id))
    write(parts)
    _, rest, text = read(last, " c")
    assert (text, begun + rest) == (" c" if told else "", list(range(7 if told else 6)))


def rows() -> list[dict[str, Any]]:
    bodies = (CUT, {"max_output_tokens": 210, "seed": 0, "metadata": {"a": "b"}})
    return [
        {"custom_id": str(n), "method": "POST", "url": URL, "body": {**PLAIN, **body}}
        for n, body in enumerate(bodies)
    ]


def require_answers(lines: list[dict[str, Any]]) -> None:
    cut, whole = (require_whole(line["response"]["body"]) for line in lines)
    assert (cut.status, whole.status) == ("incomplete", "completed")
    assert cut.output_text
    assert whole.metadata == {"a": "b"}


@pytest.mark.usefixtures("worker")
def test_a_batch_of_responses_is_served_and_a_wrong_row_is_named(client: OpenAI) -> None:
    bad = {**rows()[0], "body": {**PLAIN, "max_output_tokens": 0}}
    found = []
    for lines in (rows(), [bad]):
        source = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = client.files.create(file=("x.jsonl", source), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h"
        ).id
        wait_for(lambda batch=batch: client.batches.retrieve(batch).status in ENDED)
        found.append(client.batches.retrieve(batch))
    done, failed = found
    assert done.status == "completed"
    text = client.files.content(done.output_file_id or "").text
    require_answers([json.loads(line) for line in text.splitlines()])
    assert failed.errors
    assert failed.errors.data
    assert (failed.errors.data[0].message or "").startswith(
        "line 1, id '0': max_output_tokens: got 0"
    )


ENDED = ("completed", "failed")


@pytest.mark.usefixtures("worker")
def test_a_file_of_responses_runs_from_the_command_line_and_makes_a_table(
    redis_url: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.csv"
    source.write_text("".join(json.dumps(line) + "\n" for line in rows()))
    arguments = ["run", str(source), "-o", str(output), "--ordered", "--redis-url", redis_url]
    for _ in range(2):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 0, done.output
    lines = (tmp_path / "out.csv.jsonl").read_text().splitlines()
    bodies = [json.loads(line) for line in lines]
    require_answers(bodies)
    said = [Response.model_validate(each["response"]["body"]).output_text for each in bodies]
    assert [each.text for each in read_results(output)] == said
    header, cut, _ = output.read_text().splitlines()
    assert dict(zip(header.split(","), cut.split(","), strict=True))["finish_reason"] == "length"
