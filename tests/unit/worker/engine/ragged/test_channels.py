"""Answers on channels keep to their form, their constraint and their budget, however they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from omlx_producer.wire import GenerationRequest, ModelInfo
from omlx_worker.delivery.response import message_of
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.text import RowText
from tests.helpers.checkpoints import write_llama
from tests.helpers.constrained import grammars, play
from tests.helpers.decoding import Loaded
from tests.helpers.forms import FORMS

BUDGET = 6
CODE = {"structured_outputs": {"regex": "[abdef]{4}"}}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model with the tokens of channels. Its weights are random."""
    path = write_llama(tmp_path_factory.mktemp("channels"), vocab_size=264)
    FORMS["harmony"].tokenizer._tokenizer.save_pretrained(path)
    return Loaded.at(path)


def rows_of(loaded: Loaded, seeds: Sequence[int], **fields: Any) -> list[RowRequest]:
    info = ModelInfo(model="m", context_length=1024, longest_token=12)
    prompter = Prompter(loaded.tokenizer, info, 264, Sampling(), grammars=grammars(loaded))
    messages = [{"role": "user", "content": "Which code?"}]
    given: dict[str, Any] = {"model": "m", "messages": messages, "thinking_token_budget": BUDGET}
    given |= {"max_completion_tokens": 400, "temperature": 1.0, **fields}
    # Odd ones begin with analysis, none with commentary, which these weights would never end.
    final, commentary = loaded.tokenizer.encode("fc", add_special_tokens=False)
    given["logit_bias"] = {str(commentary): -100}
    thinks = {"logit_bias": {str(final): -100, str(commentary): -100}}
    return [
        replace(row, row_id=str(seed))
        for seed in seeds
        for row in prompter.rows(
            GenerationRequest.parse(given | {"seed": seed} | (thinks if seed % 2 else {})), "j"
        )
    ]


def message(loaded: Loaded, row: RowRequest, tokens: Sequence[int]) -> tuple[dict[str, Any], int]:
    """The message of a row with these tokens, and how many of them are thinking."""
    text = RowText(row, loaded.tokenizer)
    said = "".join(text.feed(token).text for token in tokens)
    marks = [mark.offset for mark in text.marks]
    return message_of(said, row.reply, row.row_id, marks=marks), text.reasoning_tokens


@pytest.mark.parametrize("lookup", [0, 4])
def test_a_constraint_holds_for_the_answer_after_thinking(loaded: Loaded, lookup: int) -> None:
    rows = rows_of(loaded, range(12), **CODE)
    ended = play(loaded.decoder(0, lookup), rows, loaded=loaded)
    for row in rows:
        told, thinking = message(loaded, row, ended[row.row_id].tokens)
        odd = int(row.row_id) % 2
        assert ended[row.row_id].reason == "stop"
        assert len(told["content"]) == 4
        assert set(told["content"]) <= set("abdef")
        # A character may have several bytes, and so tokens.
        assert BUDGET * odd <= thinking <= (BUDGET + 3) * odd


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_row_goes_on_the_same_after_each_of_its_tokens(loaded: Loaded, apart: int) -> None:
    [row] = rows_of(loaded, [3], **CODE)
    whole = play(loaded.decoder(0, 4), [row], loaded=loaded)[row.row_id]
    for count in range(1, len(whole.tokens) - 1, apart):
        part = Row(row, generated=whole.tokens[:count])
        again = play(loaded.decoder(0, 4), [part], loaded=loaded)[part.row_id]
        assert (again.tokens, again.text) == (whole.tokens, whole.text), count


def test_thinking_that_is_closed_by_its_budget_is_followed_by_an_answer(loaded: Loaded) -> None:
    begun = loaded.tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
    rows = [
        Row(row, generated=begun) for row in rows_of(loaded, range(8), max_completion_tokens=120)
    ]
    ended = play(loaded.decoder(0, 0), rows, loaded=loaded)
    header = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for row in rows:
        told, thinking = message(loaded, row.request, ended[row.row_id].tokens)
        assert BUDGET <= thinking <= BUDGET + 3
        assert header in ended[row.row_id].text
        assert "final<|message|>" not in told["content"]
