"""Requests with a budget of thinking, through the engine: chats, constraints, other loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from omlx_producer.wire import GenerationRequest, InvalidRequest
from omlx_worker.delivery.response import message_of
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.rows.emission import Emission
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import enter

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hi"}]


def thinking(path: Path) -> Path:
    """The checkpoint, with markers of thinking and a template that opens it."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("assistant: ", "assistant: <think>\n")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking(write_qwen(tmp_path_factory.mktemp("qwen"), vocab_size=260))


@pytest.fixture(scope="module")
def engine(path: Path) -> DecodingEngine:
    return load_engine(str(path), max_rows=4, depth=2)


def answered(engine: DecodingEngine, **fields: Any) -> tuple[dict[str, Any], Emission]:
    """The message of a chat, and the last emission of its row."""
    given = {"model": "m", "messages": MESSAGES, "max_tokens": 60, "seed": 1, **fields}
    [asked] = engine.prepare(GenerationRequest.parse(given), "job")
    enter(engine, asked)
    emissions: list[Emission] = []
    while not emissions or emissions[-1].finish_reason is None:
        emissions += engine.step()
    text = "".join(emission.text for emission in emissions)
    marks = [mark.offset for emission in emissions for mark in emission.marks]
    return message_of(text, asked.reply, asked.row_id, marks=marks, cut=True), emissions[-1]


def test_an_answer_follows_the_thinking_that_the_budget_ended(engine: DecodingEngine) -> None:
    free, last = answered(engine, ignore_eos=True)
    assert (free["content"], last.reasoning_tokens) == ("", 60), "it thinks up to its limit"

    message, last = answered(engine, ignore_eos=True, thinking_token_budget=9)

    assert last.reasoning_tokens == 9
    assert message["content"]
    assert free["reasoning_content"].startswith(message["reasoning_content"])


def test_a_constraint_begins_after_the_thinking_that_the_budget_ended(
    engine: DecodingEngine,
) -> None:
    message, last = answered(
        engine, thinking_token_budget=5, structured_outputs={"choice": ["yes", "no"]}
    )
    assert message["content"] in ("yes", "no")
    assert (last.reasoning_tokens, last.finish_reason) == (5, "stop")


def test_a_worker_has_a_budget_for_requests_without_one(path: Path) -> None:
    engine = load_engine(str(path), max_rows=1, thinking_budget=4)
    told = {
        budget: answered(engine, ignore_eos=True, thinking_token_budget=budget)[1].reasoning_tokens
        for budget in (None, 6, 0, -1)
    }
    assert told == {None: 4, 6: 6, 0: 0, -1: 60}


def test_a_decision_is_refused_where_the_prompt_opens_the_thinking(engine: DecodingEngine) -> None:
    sentence = '^probabilities: the prompt opens the thinking of .*; give reasoning_effort: "none"'
    with pytest.raises(InvalidRequest, match=sentence):
        answered(engine, structured_outputs={"choice": ["yes", "no"]}, probabilities=True)


def test_a_model_that_marks_no_thinking_refuses_a_budget_and_ignores_the_workers() -> None:
    engine = load_engine("demo", max_rows=1, thinking_budget=4)
    with pytest.raises(InvalidRequest, match="thinking_token_budget: demo does not mark its"):
        answered(engine, thinking_token_budget=9)
    assert answered(engine, ignore_eos=True, max_tokens=8)[1].reasoning_tokens == 0
