"""An emission: the tokens, the text and the end of a row, as consumers get them.

This module imports no MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import FinishReason, PromptLogprob, TokenLogprob
from omlx_worker.engine.rows.row import Source


class Mark(NamedTuple):
    """A token of a row that may write a marker.

    Attributes:
        token: its index among the row's generated tokens.
        offset: where its text begins in the row's text.
    """

    token: int
    offset: int


class Said(NamedTuple):
    """The text that some tokens of a row have made final, and those of them that are marks."""

    text: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to one row.

    Attributes:
        tokens: committed token ids, without the stop token that ended the row.
        text: text that is final: never half a character, never part of a stop string.
        logprobs: one per token; None if the row did not ask for them.
        finish_reason: set once, with the row's last emission.
        drafted: drafts that the step judged for the row.
        accepted: how many of them it accepted: a prefix of the drafts.
        drafted_text: characters at the start of ``text`` that accepted drafts released.
        step_depth: the most drafts that the step could judge for any row.
        source: who made the drafts, or would have made them at a depth of 0.
        marks: those of the tokens; their text may come later.
        reasoning_tokens: those of all the row's tokens so far that are thinking.
        rejoins: whether the row has left, to be added again with all of its tokens.
        error: why the row failed. It has ended then.
        prompt_logprobs: of all tokens of the prompt, or of the row's targets, once, if they were
            asked for.
        vector: of the prompt, as float32, if it was asked for; the row has ended then.
    """

    row_id: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    drafted_text: int = 0
    step_depth: int = 0
    source: Source = "model"
    marks: Sequence[Mark] = ()
    reasoning_tokens: int = 0
    rejoins: bool = False
    error: InvalidRequest | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    vector: bytes | None = None
