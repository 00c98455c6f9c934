"""Whatever a model writes under the grammar of required calls is read as calls that are right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance.numpy as bitmasks
import numpy as np
import pytest
from llguidance import LLMatcher

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.rows.chat import Chat
from tests.helpers.chats import ADDED, answer_of, tokenizer_of, vocabulary

WALKS = 15
LONGEST = 3000
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": ["boolean", "null"]},
        "spots": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "ratio": {"type": "number", "minimum": 0, "maximum": 1},
        "deep": {
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
                "b": {"type": "boolean"},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
        "many": {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 999}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["place", "days", "many", "ratio"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
]
# What ends a text in one family or another; without a bias, a walk would not find it.
ENDS = ("\n</parameter>\n", "</parameter>\n", "</param>", '"')


class Walker:
    """Walks through a grammar at random, one byte at a time."""

    def __init__(self, family: str, grammar: str, seed: str) -> None:
        self._tokenizer = tokenizer_of(family, thinking=True)
        self._tokens = vocabulary(self._tokenizer)
        self._matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar))
        self._random = random.Random(seed)

    def walk(self) -> list[int] | None:
        """The tokens of a whole text; None if it gets too long."""
        text, tokens = "", list[int]()
        for _ in range(LONGEST):
            over = self._matcher.is_accepting()
            if self._matcher.is_stopped() or (over and self._random.random() < 0.7):
                return tokens
            token = self._step(text)
            assert self._matcher.consume_token(token)
            text += self._tokenizer.decode([token])
            tokens.append(token)
        return None

    def _step(self, text: str) -> int:
        allowed = self._allowed()
        for begun, end in self._begun(text):
            token = self._id(end[begun])
            if token in allowed and self._random.random() < (0.9 if begun else 0.1):
                return token
        plain = [t for t in allowed if t > 256 or " " <= self._tokenizer.decode([t]) <= "~"]
        return self._random.choice(plain or allowed)

    def _begun(self, text: str) -> Iterator[tuple[int, str]]:
        """The ends that the text has begun, and how much of them."""
        for end in ENDS:
            yield max(n for n in range(len(end)) if text.endswith(end[:n])), end

    def _allowed(self) -> list[int]:
        mask = bitmasks.allocate_token_bitmask(1, self._tokens.vocab_size)
        bitmasks.fill_next_token_bitmask(self._matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        ends = self._tokenizer.eos_token_ids
        return [int(token) for token in np.flatnonzero(bits) if token not in ends]

    def _id(self, character: str) -> int:
        [token] = self._tokenizer.encode(character, add_special_tokens=False)
        return int(token)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("family", [family for family in ADDED if family != "gemma4"])
def test_every_walk_ends_in_calls_that_match_their_schemas(family: str, parallel: bool) -> None:
    request = GenerationRequest.parse(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": parallel,
        }
    )
    chat = Chat(tokenizer_of(family, thinking=True), "m")
    form = chat.reply(request, chat.text(request))
    constraint = chat.constraint(request, form)
    assert constraint is not None
    ended = 0
    for seed in range(WALKS):
        tokens = Walker(family, constraint.value, f"{family} {seed}").walk()
        if tokens is None:
            continue
        ended += 1
        message = answer_of(tokenizer_of(family, thinking=True), form, tokens)
        assert message["content"] is None
        calls = message["tool_calls"]
        assert parallel or len(calls) == 1
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                jsonschema.validate(arguments, PARAMETERS)
            else:
                assert arguments == {}
    assert ended > WALKS / 2
