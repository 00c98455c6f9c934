"""Constrained rows on the demo model: their grammars, and the texts that they end with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omlx_producer.wire import FinishReason
from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.constraints import Grammar, Grammars
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.text import RowText, decode_faithfully
from tests.helpers.decoding import GREEDY, Loaded, enter, record, row

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "minLength": 2, "maxLength": 12},
        "quantity": {"type": "integer", "minimum": 3, "maximum": 90},
        "is_paid": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["customer_name", "quantity", "is_paid", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ended:
    """A row that has ended."""

    text: str
    reason: FinishReason
    tokens: tuple[int, ...]
    steps: int = 0


_MADE: dict[int, Grammars] = {}


def grammars(loaded: Loaded | None = None) -> Grammars:
    """Those of a model, the demo model by default; kept for the next test."""
    loaded = loaded or Loaded.demo()
    key = id(loaded.network)
    if key not in _MADE:
        decode_faithfully(loaded.tokenizer)
        config = loaded.config.get("text_config", loaded.config)
        _MADE[key] = Grammars(loaded.tokenizer, config["vocab_size"])
    return _MADE[key]


def grammar_of(schema: Mapping[str, Any], loaded: Loaded | None = None) -> Grammar:
    return grammars(loaded).compile(Constraint("json_schema", json.dumps(schema)))


def constrained(
    name: str,
    grammar: Grammar | None = None,
    sampling: Sampling = GREEDY,
    *,
    prompt: str = "def f(x):\n",
    tokens: int = 160,
    loaded: Loaded | None = None,
) -> RowRequest:
    """A row that ends at an end token; of the demo model and of `ORDER` by default."""
    tokenizer = (loaded or Loaded.demo()).tokenizer
    made = row(name, tokenizer.encode(prompt), tokens, sampling)
    ends = frozenset(tokenizer.eos_token_ids)
    return replace(made, grammar=grammar or grammar_of(ORDER, loaded), stop_tokens=ends)


def free(
    name: str, sampling: Sampling = GREEDY, *, tokens: int = 40, loaded: Loaded | None = None
) -> RowRequest:
    """A row without a constraint, which ends at its limit."""
    tokenizer = (loaded or Loaded.demo()).tokenizer
    return row(name, tokenizer.encode("class Stack:\n"), tokens, sampling)


def play(
    decoder: RaggedDecoder,
    rows: Sequence[RowRequest | Row],
    *,
    pause: Mapping[str, tuple[int, int]] | None = None,
    loaded: Loaded | None = None,
) -> dict[str, Ended]:
    """Decode rows to their ends.

    Args:
        pause: rows that are suspended before some step, and the step before which they resume.
    """
    tokenizer = (loaded or Loaded.demo()).tokenizer
    records = {each.row_id: record(each) for each in rows}
    texts = {name: RowText(row.request, tokenizer) for name, row in records.items()}
    tokens = {name: row.text_tokens() for name, row in records.items()}
    said = {name: [texts[name].feed(token).text for token in tokens[name]] for name in texts}
    steps = dict.fromkeys(texts, 0)
    ended: dict[str, Ended] = {}
    for each in records.values():
        enter(decoder, each, chunk=64)
    for now in range(5_000):
        for name, (begin, end) in (pause or {}).items():
            if name not in ended and now == begin:
                decoder.suspend(records[name])
            if name not in ended and now == end:
                decoder.resume(records[name])
        for step in decoder.step():
            name = step.row_id
            if name in ended:
                continue
            steps[name] += 1
            reason: FinishReason | None = None
            for sampled in step.tokens:
                piece = texts[name].feed(sampled.token)
                tokens[name].append(sampled.token)
                said[name].append(piece.text)
                reason = piece.finish_reason
                if reason:
                    break
            if step.cut and not reason:
                said[name].append(texts[name].cut())
                reason = "length"
            if reason:
                decoder.leave(records[name])
                ended[name] = Ended("".join(said[name]), reason, tuple(tokens[name]), steps[name])
        if len(ended) == len(rows):
            return ended
    raise AssertionError("rows did not end")
