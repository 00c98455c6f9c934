"""Tokens of thinking are told from the others by the markers' tokens."""

from __future__ import annotations

import pytest

from omlx_worker.engine.rows.thinking import Thinking, Thoughts
from tests.helpers.markups import thinking

ONE = thinking((1,), (2,), begun=True)
LONG = thinking((1, 5), (2, 3, 2), begun=False)


def followed(form: Thinking, *tokens: int) -> Thoughts:
    thoughts = Thoughts(form)
    for token in tokens:
        thoughts.feed(token)
    return thoughts


@pytest.mark.parametrize(
    ("form", "tokens", "on", "count"),
    [
        (ONE, (), True, 0),
        (ONE, (7, 7, 7), True, 3),
        (ONE, (7, 7, 2, 7, 7), False, 2),
        (ONE, (2, 7), False, 0),
        (ONE, (7, 2, 8, 1, 7, 7), True, 3),
        (ONE, (7, 1, 7, 2, 2, 8), False, 3),
        (LONG, (7, 7, 1, 7), False, 0),
        (LONG, (1, 5, 7, 2, 3), True, 3),
        (LONG, (1, 5, 7, 2, 3, 2, 8), False, 1),
        (LONG, (1, 1, 5, 7), True, 1),
        (LONG, (1, 5, 2, 2, 3, 2, 9), False, 1),
    ],
)
def test_tokens_between_the_markers_are_thinking(
    form: Thinking, tokens: tuple[int, ...], on: bool, count: int
) -> None:
    thoughts = followed(form, *tokens)
    assert (thoughts.on, thoughts.tokens) == (on, count)
