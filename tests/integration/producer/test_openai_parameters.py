"""Every parameter of OpenAI's chats, as submitted: served, ignored, or refused by name."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from omlx_producer import GenerationRequest, InvalidRequest, Producer
from omlx_producer.cli.main import cli
from omlx_producer.wire.openai_fields import ignored_fields
from tests.helpers.openai_parameters import BESIDE, CHATS
from tests.helpers.waiting import fetch


def nothing_enqueued(connection: redis.Redis) -> bool:
    return not list(connection.scan_iter("rq:job:*"))


def test_the_walk_knows_every_parameter_of_a_chat() -> None:
    chat = pytest.importorskip("openai.types.chat.completion_create_params")
    streamed, whole = chat.CompletionCreateParamsStreaming, chat.CompletionCreateParamsNonStreaming
    assert set(CHATS) == {*typing.get_type_hints(streamed), *typing.get_type_hints(whole)}


@pytest.mark.parametrize("field", sorted(CHATS))
def test_a_parameter_of_a_chat_reaches_the_worker_changes_nothing_or_is_refused_by_name(
    connection: redis.Redis, producer: Producer, field: str
) -> None:
    fate, value = CHATS[field]
    chat = {"messages": [{"role": "user", "content": "a"}]} | BESIDE.get(field, {})
    without = GenerationRequest.parse({"model": "demo", **chat}).to_wire()
    fields: Any = {**chat, field: value}
    if fate == "refused":
        with pytest.raises(InvalidRequest, match=f"^{field}: (?!unknown)"):
            producer.submit(**fields)
        assert nothing_enqueued(connection)
        return
    wire = fetch(connection, producer.submit(**fields).id).kwargs["request"]
    if fate == "ignored":
        assert wire == without
        assert ignored_fields(fields) == [field]
    else:
        name = "max_completion_tokens" if field == "max_tokens" else field
        assert wire[name] == value
        assert wire != without or field == "model"


def test_the_command_line_refuses_the_same_ones_with_the_same_sentences(
    redis_url: str, producer: Producer, tmp_path: Path
) -> None:
    lines, sentences = [], []
    for field in sorted(field for field, (fate, _) in CHATS.items() if fate == "refused"):
        body = {"messages": [{"role": "user", "content": "a"}], field: CHATS[field][1]}
        lines.append({"custom_id": field, "url": "/v1/chat/completions", "body": body})
        with pytest.raises(InvalidRequest) as caught:
            producer.submit(body)
        sentences.append(f"line {len(lines)}, id '{field}': {caught.value}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(cli, ["run", str(rows), "--dry-run", "--redis-url", redis_url])
    assert (done.exit_code, done.stderr.splitlines()) == (1, sentences)


def test_a_parameter_that_nobody_knows_is_refused_by_name(producer: Producer) -> None:
    fields: Any = {"prompt": "x", "guided_regex": "a"}
    with pytest.raises(InvalidRequest, match=r"^guided_regex: unknown field; remove it"):
        producer.submit(**fields)
